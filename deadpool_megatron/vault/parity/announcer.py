"""Telling the holder of a parity block of a role's group what the role has sealed.

As in copies/shipper.py nothing is queued and everything is found out by looking again. The bytes
are fetched by the holder, once all roles of the group have spoken: see parity/maker.py. It answers
``sealed`` when the block is; when that takes too long, ``waited``, and is asked again.
"""

from __future__ import annotations

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.core.sender import Sender
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import Refusal, Refused
from deadpool_megatron.vault.net.transport import Transport
from deadpool_megatron.vault.shm.table import Place


class Announcer(Sender[tuple[Generation, list[Place]]]):
    """Thread that has one role's generations of one epoch taken into one parity block."""

    def __init__(
        self,
        state: VaultState,
        transport: Transport,
        layout: RoleLayout,
        block: int,
        node: int,
        epoch: int,
    ) -> None:
        super().__init__(state, transport, layout, node, epoch, "announce")
        self._block = block

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
        refused = Refused.in_answer(channel.receive())
        if refused and refused.why is Refusal.WAITED:
            return True  # there is no need for a pause: the holder makes one, and ends it in time
        if refused and refused.why is not Refusal.SUPERSEDED:
            if refused.why is not Refusal.EARLY:
                self._state.refuse(
                    f"contribution: {refused}", role=self._layout.role, by=self._node
                )
            return False
        names = [place.name for place in places]
        self._state.acknowledge(self._layout, generation, self._node, names, self._epoch)
        return True
