"""Sending a role's sealed parts to one buddy, again and again until it has them or the epoch ends.

Nothing is queued: what is owed follows from the table and the ledger, so a broken connection, a
stopped or restarted buddy and a restart of this vault all resume by looking again.

One put: ``put`` with the parts on offer, ``need`` with those the buddy lacks, their raw bytes in
that order, ``sealed``. The bytes go from the mapped slot to the socket without a copy in Python.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.segment import checksum
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.table import Place
from deadpool_megatron.vault.traffic import Flow
from deadpool_megatron.vault.transport import Channel, Transport
from deadpool_megatron.wire.framing import WireError

log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5


class Shipper(threading.Thread):
    """Thread that brings one role's generations of one epoch to one buddy."""

    def __init__(
        self, state: VaultState, transport: Transport, layout: RoleLayout, node: int, epoch: int
    ) -> None:
        super().__init__(name=f"ship-{layout.role}-to-{node}", daemon=True)
        self._state = state
        self._transport = transport
        self._layout = layout
        self._node = node
        self._epoch = epoch
        self._channel: Channel | None = None

    def run(self) -> None:
        """Until the epoch is closed."""
        pause = _FIRST_PAUSE_SECONDS
        while self._state.is_open(self._epoch):
            work = self._next()
            if work is None:
                continue
            try:
                done = self._put(*work)
            except (OSError, WireError, LookupError, TypeError, ValueError) as error:
                log.info("%s: %s: %s", self.name, type(error).__name__, error)
                self._disconnect()
                done = False
            if done:
                pause = _FIRST_PAUSE_SECONDS
                continue
            with self._state.changed:
                self._state.changed.wait_for(
                    lambda: not self._state.is_open(self._epoch), timeout=pause
                )
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._disconnect()

    def cut(self) -> None:
        """Break the connection, from any thread: the epoch is over."""
        channel = self._channel
        if channel is not None:
            channel.shutdown()

    def _disconnect(self) -> None:
        """Only this thread closes: a descriptor must not be reused under its feet."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _next(self) -> tuple[Generation, list[Place]] | None:
        with self._state.changed:
            work = self._state.shipment(self._layout, self._node, self._epoch)
            if work is None and self._state.is_open(self._epoch):
                self._state.changed.wait(timeout=1.0)
            return work

    def _put(self, generation: Generation, places: list[Place]) -> bool:
        """True when the buddy has the parts; False to try again after a pause."""
        failpoints.hit(
            "vault.ship", role=self._layout.role, iteration=generation.iteration, to=self._node
        )
        channel = self._connect()
        channel.send(
            {
                "t": "put",
                "epoch": self._epoch,
                "node": self._state.node,
                "role": self._layout.role,
                "generation": generation.to_list(),
                "layout_hash": self._layout.layout_hash,
                "parts": [[place.name, place.nbytes, place.checksum] for place in places],
            }
        )
        answer = channel.receive()
        if answer["t"] == "refused":
            return self._refused(answer, generation, places)
        wanted = set(answer["parts"])
        nbytes = sum(place.nbytes for place in places if place.name in wanted)
        flow = self._state.traffic.flow(
            self._layout.role, generation, self._node, nbytes, self._epoch
        )
        for place in places:
            if place.name in wanted:
                self._send_part(channel, flow, place)
        answer = channel.receive()
        if answer["t"] == "refused":
            return self._refused(answer, generation, places)
        flow.end()
        sealed = set(answer["parts"])
        names = [place.name for place in places if place.name in sealed]
        self._state.acknowledge(
            self._layout,
            generation,
            self._node,
            names,
            self._epoch,
            shipped_bytes=nbytes,
        )
        damaged = [place for place in places if place.name not in sealed]
        for place in damaged:
            self._examine(place)
        return not damaged

    def _connect(self) -> Channel:
        if self._channel is None:
            address = self._state.address(self._node)
            if address is None:
                raise WireError(f"node {self._node} has no address in epoch {self._epoch}")
            channel = self._transport.connect(address.host, address.vault_port)
            self._channel = channel
            if not self._state.is_open(self._epoch):
                raise WireError("the epoch was closed while connecting")
            channel.send({"t": "offer", "layout": self._layout.to_dict()})
        return self._channel

    def _send_part(self, channel: Channel, flow: Flow, place: Place) -> None:
        sent = 0
        for chunk in flow.pieces(place.view, self._going):
            fault = failpoints.hit(
                "vault.chunk",
                role=self._layout.role,
                iteration=flow.generation.iteration,
                to=self._node,
                part=place.name,
            )
            if fault is not None:
                damaged = bytearray(chunk)
                damaged[0] ^= 0xFF
                chunk = memoryview(damaged)
            channel.send_bulk(chunk)
            self._state.counters["bytes shipped"] += len(chunk)
            sent += len(chunk)
        if sent < place.nbytes:
            raise WireError("the epoch was closed")

    def _going(self) -> bool:
        return self._state.is_open(self._epoch)

    def _refused(
        self, answer: Mapping[str, Any], generation: Generation, places: list[Place]
    ) -> bool:
        why = str(answer["why"])
        if why == "superseded":
            names = [place.name for place in places]
            self._state.acknowledge(
                self._layout, generation, self._node, names, self._epoch, shipped_bytes=0
            )
            return True
        if why != "early":
            self._state.refuse(f"put: {why}", role=self._layout.role, by=self._node)
        return False

    def _examine(self, place: Place) -> None:
        """The buddy found other bytes than were announced: was it the wire or our memory?"""
        found = checksum(place.view)
        if found != place.checksum:
            self._state.mark_bad(place, found)
