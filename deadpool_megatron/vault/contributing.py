"""Sending a role's sealed shard parts to the holder of a parity block of its group.

As in vault/shipping.py nothing is queued and everything is found out by looking again. How far a
contribution has come is known to the holder, which says where to go on: a broken connection costs
one piece. The dialogue is described in vault/combining.py.
"""

from __future__ import annotations

from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.combining import DIGEST
from deadpool_megatron.vault.segment import checksum_of
from deadpool_megatron.vault.shipping import Shipper
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.table import Place
from deadpool_megatron.vault.transport import Channel, Transport
from deadpool_megatron.wire.framing import WireError


class Contributor(Shipper):
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
        super().__init__(state, transport, layout, node, epoch)
        self.name = f"contribute-{layout.role}-to-{node}"
        self._block = block
        self._sent_bytes = 0  # since the last acknowledgement

    def _work(self) -> tuple[Generation, list[Place]] | None:
        return self._state.shipment(self._layout, self._node, self._epoch, coded=True)

    def _put(self, generation: Generation, places: list[Place]) -> bool:
        """True when the block with these parts is sealed, or to ask again at once; False to ask
        again after a pause."""
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
            by_name = {place.name: place for place in places}
            size = int(answer["chunk_bytes"])
            for name, offset in answer["parts"]:
                self._send_from(channel, generation, by_name[name], int(offset), size)
            answer = channel.receive()
        if answer["t"] == "refused" and answer["why"] == "waited":
            return True  # there is no need for a pause: the holder makes one, and ends it in time
        return self._judge(answer, generation, places)

    def _judge(self, answer: dict[str, Any], generation: Generation, places: list[Place]) -> bool:
        if answer["t"] == "refused":
            return self._refused(answer, generation, places)
        if answer["t"] == "damaged":
            for place in places:
                if place.name in answer["parts"]:
                    self._examine(place)
            return False
        names = set(answer["parts"])
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

    def _send_from(
        self, channel: Channel, generation: Generation, place: Place, offset: int, size: int
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
            self._send_chunk(channel, generation, place, chunk)
            self._sent_bytes += len(chunk)
            channel.send_bulk(memoryview(DIGEST.pack(digest.intdigest())))
