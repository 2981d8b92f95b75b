"""The commit rule, pure: how far a generation is committed, and what is still to be sent.

A generation of a role is committed at a boundary when its own slot has all shard parts and the
extras up to that boundary sealed, and every target that the scheme names has acknowledged what it
is owed: a buddy a copy, the holder of a parity block that the part is in the block, which is
sealed. Where a generation travels as a step (:mod:`..schemes.recompute`), the parts of the step
stand for the shard parts that they lead to: a buddy acknowledges them only if it holds what they
begin from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from deadpool_megatron.layout.records import (
    BOUNDARIES,
    Generation,
    PartKind,
    RoleLayout,
    extras_part,
    kind_of,
)
from deadpool_megatron.vault.schemes.base import Scheme, Target


class Ledger:
    """Acknowledged parts of one epoch. Not thread-safe: the vault's lock guards it."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._acknowledged: dict[tuple[int, Generation, int], set[str]] = {}

    def released(self, layout: RoleLayout, generation: Generation) -> bool:
        """True when the record lets this role pass with fewer copies and it has to."""
        fewer = self.scheme.record.fewer_copies
        return layout.role in fewer and self.scheme.owed(layout, generation).is_short

    def acknowledge(
        self, role: int, generation: Generation, node: int, names: Iterable[str]
    ) -> None:
        """A node has sealed these parts, or the parity blocks they are in."""
        self._acknowledged.setdefault((role, generation, node), set()).update(names)

    def forget(self, role: int, generation: Generation, node: int) -> None:
        """A node has lost what it had acknowledged of a generation."""
        self._acknowledged.pop((role, generation, node), None)

    def forget_before(self, role: int, oldest: Generation) -> None:
        """No slot holds anything older any more: nothing of it can be asked for."""
        for key in [k for k in self._acknowledged if k[0] == role and k[1] < oldest]:
            del self._acknowledged[key]

    def missing(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str], target: Target
    ) -> list[str]:
        """Sealed parts that a target is owed and has not acknowledged, in layout order."""
        owed = self.scheme.owed(layout, generation).names.get(target, frozenset())
        done = self._done(layout.role, generation, target)
        left = (owed & {*sealed}) - done
        return [part.name for part in layout.parts if part.name in left]

    def boundary(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str]
    ) -> str | None:
        """The last boundary at which the generation is committed, or None."""
        owed = self.scheme.owed(layout, generation)
        if owed.is_short and layout.role not in self.scheme.record.fewer_copies:
            return None
        lacking = set[str]().union(
            *(
                names - self._done(layout.role, generation, target)
                for target, names in owed.names.items()
            )
        )
        needed = {*layout.shard_parts}
        steps = {part.name for part in layout.parts if kind_of(part.name) is PartKind.STEP}
        if any(steps & names for names in owed.names.values()):
            needed |= steps
        if not needed <= {*sealed} - lacking:
            return None
        reached = None
        for boundary in BOUNDARIES:
            name = extras_part(boundary)
            if name in sealed:
                if name in lacking:
                    break
                reached = boundary
        return reached

    def _done(self, role: int, generation: Generation, target: Target) -> set[str]:
        return self._acknowledged.get((role, generation, target.node), set())
