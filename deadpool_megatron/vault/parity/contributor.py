"""Sending a role's sealed shard parts to the holder of a parity block of its group.

As in copies/shipper.py nothing is queued and everything is found out by looking again. How far a
contribution has come is known to the holder, which says where to go on: a broken connection costs
one piece. The dialogue is described in parity/combiner.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.core.sender import Sender
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.core.traffic import Flow
from deadpool_megatron.vault.errors import Refusal, Refused
from deadpool_megatron.vault.net.transport import Channel, Transport
from deadpool_megatron.vault.parity.combiner import DIGEST
from deadpool_megatron.vault.shm.segment import checksum_of
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.wire.framing import WireError


class Contributor(Sender[tuple[Generation, list[Place]]]):
    """Thread that brings one role's generations of one epoch into one parity block."""

    def __init__(
        self,
        state: VaultState,
        transport: Transport,
        layout: RoleLayout,
        block: int,
        node: int,
        epoch: int,
    ) -> None:
        super().__init__(state, transport, layout, node, epoch, "contribute")
        self._block = block
        self._sent_bytes = 0  # since the last acknowledgement

    def _next(self) -> tuple[Generation, list[Place]] | None:
        with self._state.changed:
            work = self._state.shipment(self._layout, self._node, self._epoch, coded=True)
            if work is None and self._going():
                self._state.changed.wait(timeout=1.0)
            return work

    def _bring(self, work: tuple[Generation, list[Place]]) -> bool:
        """True when the block with these parts is sealed, or to ask again at once; False to ask
        again after a pause."""
        generation, places = work
        failpoints.hit(
            "vault.contribute",
            role=self._layout.role,
            iteration=generation.iteration,
            to=self._node,
        )
        channel = self._connect()
        channel.send(
            {
                "t": "contribute",
                "epoch": self._epoch,
                "node": self._state.node,
                "role": self._layout.role,
                "block": self._block,
                "generation": generation.to_list(),
                "layout_hash": self._layout.layout_hash,
                "parts": [[place.name, place.nbytes, place.checksum] for place in places],
            }
        )
        answer = channel.receive()
        if answer["t"] == "want":
            self._send_all(channel, generation, places, answer)
            answer = channel.receive()
        return self._judge(answer, generation, places)

    def _judge(
        self, answer: Mapping[str, Any], generation: Generation, places: list[Place]
    ) -> bool:
        refused = Refused.in_answer(answer)
        if refused and refused.why is Refusal.WAITED:
            return True  # there is no need for a pause: the holder makes one, and ends it in time
        if answer["t"] == "damaged":
            for place in places:
                if place.name in answer["parts"]:
                    self._examine(place)
            return False
        if refused and refused.why is not Refusal.SUPERSEDED:
            if refused.why is not Refusal.EARLY:
                self._state.refuse(
                    f"contribution: {refused}", role=self._layout.role, by=self._node
                )
            return False
        names = {place.name for place in places} if refused else set(answer["parts"])
        self._state.acknowledge(
            self._layout,
            generation,
            self._node,
            [place.name for place in places if place.name in names],
            self._epoch,
            shipped_bytes=self._sent_bytes,
        )
        self._sent_bytes = 0
        return True

    def _send_all(
        self,
        channel: Channel,
        generation: Generation,
        places: list[Place],
        wanted: Mapping[str, Any],
    ) -> None:
        """Send what the holder lacks, at the pace of all protection traffic."""
        by_name = {place.name: place for place in places}
        size = int(wanted["chunk_bytes"])
        offsets = {str(name): int(offset) for name, offset in wanted["parts"]}
        nbytes = sum(by_name[name].nbytes - offset for name, offset in offsets.items())
        flow = self._state.traffic.flow(
            self._layout.role, generation, nbytes, self._epoch, channel.busy_seconds
        )
        for name, offset in offsets.items():
            self._send_from(channel, flow, by_name[name], offset, size)
        if offsets:
            flow.end(self._node)

    def _send_from(
        self, channel: Channel, flow: Flow, place: Place, offset: int, size: int
    ) -> None:
        """Send a part from ``offset`` on, in pieces of ``size`` bytes, each with the digest of all
        that the holder has when it has that piece."""
        view = place.view
        if not 0 <= offset <= len(view) or size < 1:
            raise WireError(f"{place.name} has no offset {offset} in pieces of {size}")
        digest = checksum_of(view[:offset])
        channel.send_bulk(memoryview(DIGEST.pack(digest.intdigest())))
        for start in range(offset, len(view), size):
            chunk = view[start : start + size]
            digest.update(chunk)
            self._send_paced(channel, flow, place, chunk)
            self._sent_bytes += len(chunk)
            channel.send_bulk(memoryview(DIGEST.pack(digest.intdigest())))
