"""Parity: shard parts as coded blocks over a group of roles, extras as copies (REFT's AEC).

A role's vault announces to the holder of each block of its group what it has sealed. As in
replicate.py nothing is queued and everything is found out by looking again. The bytes are fetched
by the holder, once all roles of the group have spoken: see :mod:`.parity_maker`. It answers
``sealed`` when the block is; when that takes too long, ``waited``, and is asked again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from deadpool_megatron import failpoints
from deadpool_megatron.layout.parity_groups import ParityPlacement
from deadpool_megatron.layout.part_kinds import PartKind
from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout, is_parity_role
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import Refusal, Refused
from deadpool_megatron.vault.net.transport import Transport, begin_thread
from deadpool_megatron.vault.replicate import Sender, Work
from deadpool_megatron.vault.schemes.base import Copies, Parts, Target
from deadpool_megatron.vault.schemes.parity_decode import load_code
from deadpool_megatron.vault.schemes.parity_maker import BlockMaker


class Parity(Copies):
    """Blocks are computed of shard parts only (layout.parity_groups)."""

    def __init__(self, record: EpochRecord) -> None:
        super().__init__(record)
        self.placement = ParityPlacement.of_record(record)
        self._makers: dict[int, BlockMaker] = {}
        begin_thread("load-code", partial(load_code, record.replicas))

    def coded(self, layout: RoleLayout) -> list[str]:
        """Shard parts that go into the blocks of the role's group."""
        return self._uncovered(layout, PartKind.SHARD)

    def holders(self, role: int) -> list[Target]:
        """Return who holds the blocks that a role is part of."""
        group = self.placement.group_of(role)
        if group is None:
            return []
        return [
            Target(node, block) for block, node in zip(group.blocks, group.holders, strict=True)
        ]

    def _ways(
        self, layout: RoleLayout, kind: PartKind
    ) -> Iterable[tuple[Sequence[Target], Collection[str]]]:
        return [
            (self._buddies(layout), self._uncovered(layout, PartKind.EXTRAS)),
            (self.holders(layout.role), self.coded(layout)),
        ]

    def keeps(self, layout: RoleLayout, node: int) -> Collection[str]:
        if not is_parity_role(layout.role):
            return super().keeps(layout, node)
        found = self.placement.block(layout.role)
        if found is None or found[0].holders[found[1]] != node:
            return ()
        return [part.name for part in layout.parts]

    def sender(
        self, state: VaultState, transport: Transport, layout: RoleLayout, target: Target
    ) -> Sender:
        if target.block is None:
            return super().sender(state, transport, layout, target)
        return Announcer(state, transport, layout, target, self.record.epoch)

    def announced(
        self,
        state: VaultState,
        transport: Transport,
        block: int,
        layout: RoleLayout,
        generation: Generation,
        parts: Parts,
    ) -> None:
        maker = self.maker(state, transport, block, layout.role)
        maker.announced(layout, generation, parts)

    def maker(self, state: VaultState, transport: Transport, block: int, role: int) -> BlockMaker:
        """Return who makes a block that ``role`` is part of. Raises Refused when nobody does, here
        and in this epoch, or while the host has no thread for it."""
        with state.lock:
            if not state.is_open(self.record.epoch):
                raise Refused(Refusal.STALE)
            found = self.placement.block(block)
            if found is None or role not in found[0].roles:
                raise Refused(Refusal.WRONG_BLOCK)
            if found[0].holders[found[1]] != state.node:
                raise Refused(Refusal.WRONG_HOLDER)
            maker = self._makers.get(block)
            if maker is None:
                maker = BlockMaker(state, transport, self, block)
                try:
                    maker.start()
                except RuntimeError as error:
                    raise Refused(Refusal.EARLY, str(error)) from error
                self._makers[block] = maker
            return maker

    def cut(self) -> None:
        """Unfinished blocks are given up."""
        for maker in list(self._makers.values()):
            maker.cut()


class Announcer(Sender):
    """Thread that has one role's generations of one epoch taken into one parity block."""

    verb = "announce"

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
        channel.send(self._offered("contribute", work, block=self._target.block))
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
