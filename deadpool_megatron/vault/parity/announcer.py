"""Telling the holder of a parity block of a role's group what the role has sealed.

As in copies/shipper.py nothing is queued and everything is found out by looking again. The bytes
are fetched by the holder, once all roles of the group have spoken: see parity/maker.py. It answers
``sealed`` when the block is; when that takes too long, ``waited``, and is asked again.
"""

from __future__ import annotations

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.vault.core.sender import Sender, Work
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import Refusal, Refused
from deadpool_megatron.vault.net.transport import Transport


class Announcer(Sender):
    """Thread that has one role's generations of one epoch taken into one parity block."""

    coded = True

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

    def _bring(self, work: Work) -> bool:
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
        channel.send(self._offered("contribute", work, block=self._block))
        refused = Refused.in_answer(channel.receive())
        if refused and refused.why is Refusal.WAITED:
            return True  # there is no need for a pause: the holder makes one, and ends it in time
        if refused and refused.why is not Refusal.SUPERSEDED:
            if refused.why is not Refusal.EARLY:
                self._state.reports.refuse(
                    f"contribution: {refused}", role=self._layout.role, by=self._node
                )
            return False
        names = [place.name for place in places]
        self._state.acknowledge(self._layout, generation, self._node, names, self._epoch)
        return True
