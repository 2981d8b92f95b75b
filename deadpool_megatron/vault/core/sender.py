"""What every thread has in common that has sealed parts of a role held once more, by the vault of
another node or by its own.

Nothing is queued: what is owed follows from the table and the ledger. So a broken connection, a
stopped or restarted vault at the other end and a restart of this one all resume by looking again.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.core.traffic import Flow
from deadpool_megatron.vault.net import fetch
from deadpool_megatron.vault.net.transport import Channel, Transport
from deadpool_megatron.vault.shm.segment import checksum
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.wire.framing import WireError

log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_LOOK_SECONDS = 1.0  # bounds what a lost wake-up could cost

# A generation and those of its parts that the node lacks.
Work = tuple[Generation, list[Place]]


class Sender(threading.Thread, ABC):
    """Thread that brings one role's generations of one epoch to one node.

    A kind of sender does what is to be done next; what, when, how often and over which connection
    is decided here. ``coded``: parts for a parity block, not for a copy.
    """

    coded: ClassVar[bool] = False

    def __init__(
        self,
        state: VaultState,
        transport: Transport,
        layout: RoleLayout,
        node: int,
        epoch: int,
        verb: str,
    ) -> None:
        super().__init__(name=f"{verb}-{layout.role}-to-{node}", daemon=True)
        self._state = state
        self._transport = transport
        self._layout = layout
        self._node = node
        self._epoch = epoch
        self._channel: Channel | None = None

    def _next(self) -> Work | None:
        """What is to be brought there; None, after a wait for news, when there is nothing."""
        with self._state.changed:
            work = self._state.shipment(self._layout, self._node, self._epoch, coded=self.coded)
            if work is None and self._going():
                self._state.changed.wait(_LOOK_SECONDS)
            return work

    def _offered(self, kind: str, work: Work, **more: object) -> dict[str, Any]:
        """The message that offers it."""
        generation, places = work
        return {
            "t": kind,
            "epoch": self._epoch,
            "node": self._state.node,
            "role": self._layout.role,
            "generation": generation.to_list(),
            "layout_hash": self._layout.layout_hash,
            "parts": [[place.name, place.nbytes, place.checksum] for place in places],
            **more,
        }

    @abstractmethod
    def _bring(self, work: Work) -> bool:
        """True to go on at once, False to try again after a pause.

        What :data:`fetch.UNREACHABLE` names breaks the connection and is followed by a pause.
        """

    def run(self) -> None:
        """Until the epoch is closed."""
        pause = _FIRST_PAUSE_SECONDS
        while self._going():
            work = self._next()
            if work is None:
                continue
            try:
                done = self._bring(work)
            except fetch.UNREACHABLE as error:
                log.info("%s: %s: %s", self.name, type(error).__name__, error)
                self._disconnect()
                done = False
            if done:
                pause = _FIRST_PAUSE_SECONDS
            else:
                with self._state.changed:
                    self._state.changed.wait_for(lambda: not self._going(), timeout=pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._disconnect()

    def cut(self) -> None:
        """Break the connection, from any thread: the epoch is over."""
        channel = self._channel
        if channel is not None:
            channel.shutdown()

    def _going(self) -> bool:
        return self._state.is_open(self._epoch)

    def _connect(self) -> Channel:
        if self._channel is None:
            address = self._state.address(self._node)
            if address is None:
                raise WireError(f"node {self._node} has no address in epoch {self._epoch}")
            channel = self._transport.connect(self._node, address.host, address.vault_port)
            self._channel = channel
            if not self._going():
                raise WireError("the epoch was closed while connecting")
            channel.give_way(self._state.settings.dscp)
            channel.send({"t": "offer", "layout": self._layout.to_dict()})
        return self._channel

    def _disconnect(self) -> None:
        """Only this thread closes: a descriptor must not be reused under its feet."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _send_paced(self, channel: Channel, flow: Flow, place: Place, view: memoryview) -> None:
        """Send a piece of a part at the pace of all protection traffic."""
        sent = 0
        for piece in flow.pieces(view, self._going):
            piece = failpoints.perhaps_damaged(
                piece,
                "vault.chunk",
                role=self._layout.role,
                iteration=flow.generation.iteration,
                to=self._node,
                part=place.name,
            )
            channel.send_bulk(piece)
            self._state.reports.counters["bytes shipped"] += len(piece)
            sent += len(piece)
        if sent < len(view):
            raise WireError("the epoch was closed")

    def _examine(self, place: Place) -> None:
        """The other end found other bytes than were announced: was it the wire or our memory?"""
        found = checksum(place.view)
        if found != place.checksum:
            self._state.mark_bad(place, found)
