"""The commit rule, pure: what a role owes to whom, and how far a generation is committed.

A generation of a role is committed at a boundary when its own slot has all shard parts and the
extras up to that boundary sealed, and every node that is owed something has acknowledged it: a
buddy a copy, the holder of a parity block that the part is in the block, which is sealed. Where a
generation travels as a step (:mod:`.steps`), the parts of the step stand for the shard parts that
they lead to: a buddy acknowledges them only if it holds what they begin from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from deadpool_megatron.layout.part_kinds import BOUNDARIES, PartKind, extras_part, kind_of
from deadpool_megatron.layout.places.copies import CopyPlacement, is_covered
from deadpool_megatron.layout.places.parity import ParityPlacement
from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout, is_parity_role
from deadpool_megatron.layout.schemes import Kind
from deadpool_megatron.vault.core.steps import Steps


class Ledger:
    """Acknowledged parts of one epoch. Not thread-safe: the vault's lock guards it."""

    def __init__(self, record: EpochRecord, steps: Steps | None = None) -> None:
        self._record = record
        self._kind = record.protection.kind
        self._steps = steps or Steps()
        self._steps.begin(record)
        self._seats = {role: seat.node for role, seat in record.seats.items()}
        self._domains = {node: address.domain for node, address in record.nodes.items()}
        self._placement = CopyPlacement.of_record(record)
        self.parity: ParityPlacement | None = None
        if record.protection.kind is Kind.PARITY:
            self.parity = ParityPlacement.of_record(record)
        self._acknowledged: dict[tuple[int, Generation, int], set[str]] = {}
        self._owed: dict[int, dict[str, tuple[int, ...]]] = {}

    def buddies(self, layout: RoleLayout) -> tuple[int, ...]:
        """Nodes that keep copies of a role, if only of its extras, in this epoch; its own node
        where it keeps a second one."""
        if self._kind is Kind.LOCAL_TWICE:
            return (self._seats[layout.role],) if layout.role in self._seats else ()
        if self._kind is Kind.LOCAL:
            return ()
        return self._placement.buddies(layout.role, layout.peers)

    def holders(self, role: int) -> dict[int, int]:
        """Parity role -> node that holds the block, for the blocks that a role is part of."""
        group = self.parity.group_of(role) if self.parity is not None else None
        return {} if group is None else dict(zip(group.blocks, group.holders, strict=True))

    def keeps(self, layout: RoleLayout, node: int) -> bool:
        """True when ``node`` goes on receiving what the segment of this layout is for."""
        if is_parity_role(layout.role):
            found = self.parity.block(layout.role) if self.parity is not None else None
            return found is not None and found[0].holders[found[1]] == node
        return node in self.buddies(layout)

    def coded(self, layout: RoleLayout) -> dict[str, int]:
        """Shard parts that go into the parity blocks of the role's group, with their capacity."""
        return {
            part.name: part.nbytes
            for part in layout.parts
            if self._is_coded(part.name) and not self._covered(layout, part.replicas)
        }

    def owed(self, layout: RoleLayout) -> Mapping[str, tuple[int, ...]]:
        """Part -> nodes that must hold it before it counts; empty when peers hold it anyway.

        Of shard parts and the steps to them only one kind counts, by the generation.
        """
        owed = self._owed.get(layout.role)
        if owed is None:
            buddies, coded = self.buddies(layout), self.coded(layout)
            holders = tuple(self.holders(layout.role).values())
            owed = self._owed[layout.role] = {
                part.name: holders
                if part.name in coded
                else buddies
                if self._is_copied(layout, part.name, part.replicas)
                else ()
                for part in layout.parts
            }
        return owed

    def elsewhere(self, layout: RoleLayout) -> list[str]:
        """Shard parts that reach no other node, as peers hold the same bytes."""
        return [
            part.name
            for part in layout.parts
            if part.name in layout.shard_parts and self._covered(layout, part.replicas)
        ]

    def exposed(self, layout: RoleLayout) -> bool:
        """True when something has to be shipped and fewer nodes are left for it than are wanted."""
        wanted = self._record.replicas
        if len(self.holders(layout.role)) < wanted and self.coded(layout):
            return True
        return len(self.buddies(layout)) < wanted and any(
            self._is_copied(layout, part.name, part.replicas) for part in layout.parts
        )

    def released(self, layout: RoleLayout) -> bool:
        """True when the record lets this role pass with fewer copies and it has to."""
        return layout.role in self._record.fewer_copies and self.exposed(layout)

    def acknowledge(
        self, role: int, generation: Generation, node: int, names: Iterable[str]
    ) -> None:
        """A node has sealed these parts, or the parity blocks they are in."""
        self._acknowledged.setdefault((role, generation, node), set()).update(names)

    def forget_before(self, role: int, oldest: Generation) -> None:
        """No slot holds anything older any more: nothing of it can be asked for."""
        for key in [k for k in self._acknowledged if k[0] == role and k[1] < oldest]:
            del self._acknowledged[key]

    def missing(
        self,
        layout: RoleLayout,
        generation: Generation,
        sealed: Collection[str],
        node: int,
        *,
        coded: bool = False,
    ) -> list[str]:
        """Sealed parts that ``node`` is owed and has not acknowledged, in layout order: those to
        be copied there, or with ``coded`` those for its parity block."""
        owed = self.owed(layout)
        done = self._acknowledged.get((layout.role, generation, node), set())
        return [
            name
            for name, nodes in owed.items()
            if name in sealed
            and node in nodes
            and name not in done
            and self._is_coded(name) == coded
            and self._steps.counts(layout, generation, name)
        ]

    def boundary(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str]
    ) -> str | None:
        """The last boundary at which the generation is committed, or None."""
        if self.exposed(layout) and layout.role not in self._record.fewer_copies:
            return None
        owed = self.owed(layout)

        def safe(name: str) -> bool:
            return name in sealed and (
                not self._steps.counts(layout, generation, name)
                or all(
                    name in self._acknowledged.get((layout.role, generation, node), ())
                    for node in owed[name]
                )
            )

        if not all(safe(name) for name in layout.shard_parts):
            return None
        if self._steps.follows(layout.role, generation) is not None and not all(
            safe(name) for name in owed if kind_of(name) is PartKind.STEP
        ):
            return None
        reached = None
        for boundary in BOUNDARIES:
            name = extras_part(boundary)
            if name in owed and name in sealed:
                if not safe(name):
                    break
                reached = boundary
        return reached

    def _is_coded(self, name: str) -> bool:
        """Shard parts only: blocks are computed of nothing else (places.parity.parity_layout)."""
        return kind_of(name) is PartKind.SHARD and self._kind is Kind.PARITY

    def _is_copied(self, layout: RoleLayout, name: str, replicas: tuple[int, ...]) -> bool:
        """Extras travel whole, whatever is done with the shards; so do steps, where they count."""
        if self._kind is Kind.LOCAL_TWICE:
            return True  # whatever peers hold: it is to be there without the network
        if self._covered(layout, replicas):
            return False
        return self._kind is not Kind.LOCAL and not self._is_coded(name)

    def _covered(self, layout: RoleLayout, replicas: tuple[int, ...]) -> bool:
        return is_covered(replicas, layout.role, self._seats, self._domains, self._record.replicas)
