"""The agent's part of the store in which communicators meet: between its members and the
coordinator.

What its members write goes to the coordinator, what they want is asked for once for all of them.
The agent keeps both until the epoch is closed and says them again at each welcome, so that neither
a cut connection nor a new coordinator loses any of it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from deadpool_megatron.cluster.link.store_hub import StoreHub
from deadpool_megatron.wire import store


class Speaker(Protocol):
    """A member."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""

    def kill(self, cause: str) -> None:
        """End the process."""


class StoreRelay:
    """Used from the agent's loop. ``send`` is the way to the coordinator."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._hub: StoreHub[Speaker] = StoreHub()
        self._own: dict[str, str] = {}
        self._wanted: dict[str, None] = {}
        self._unsaid: tuple[dict[str, str], dict[str, None]] = {}, {}
        self._is_due = False

    @property
    def epoch(self) -> int:
        """The epoch that is served; 0: none."""
        return self._hub.epoch

    def enter(self, epoch: int) -> None:
        """Serve ``epoch``; 0: none."""
        if epoch != self._hub.epoch:
            self._hub.enter(epoch)
            self._own, self._wanted, self._unsaid = {}, {}, ({}, {})

    def from_member(self, member: Speaker, message: Mapping[str, Any]) -> None:
        """Take what a member says; one that says what no member should is killed."""
        try:
            said = store.unpack(message)
            if said.epoch == self._hub.epoch > 0:  # else it has not heard of the close yet
                self._take(member, said)
        except ValueError as error:
            member.kill(f"sent garbage: {error}")

    def _take(self, member: Speaker, said: store.StoreMessage) -> None:
        values, want = self._unsaid
        new = self._hub.put(said.values)
        self._own |= new
        values |= new
        for folder in said.want:
            if self._hub.want(member, folder):
                self._wanted[folder] = want[folder] = None
        self._flush_soon()

    def from_coordinator(self, message: Mapping[str, Any]) -> None:
        """Take what members of other nodes have written."""
        try:
            said = store.unpack(message)
            if said.epoch == self._hub.epoch > 0:
                self._hub.put(said.values)
                self._flush_soon()
        except ValueError as error:
            print(f"refused of the coordinator: {error}", file=sys.stderr, flush=True)

    def repeat(self) -> None:
        """Say everything again, to a coordinator that may not have heard it or whose answers may
        be lost.
        """
        if self._own or self._wanted:
            self._unsaid = dict(self._own), dict(self._wanted)
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            # When the loop has heard everybody who speaks in this turn: they share messages.
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        epoch = self._hub.epoch
        values, want = self._unsaid
        if values or want:
            self._unsaid = {}, {}
            self._send(store.pack(epoch, values, want))
        for members, piece in self._hub.deliveries():
            message = store.pack(epoch, piece)
            for member in members:
                member.send(message)
