"""The commit rule, pure: which copies a role owes, and how far a generation is committed.

A generation of a role is committed at a boundary when its own slot has all shard parts and the
extras up to that boundary sealed, and every buddy that is owed a copy has acknowledged it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from deadpool_megatron.layout.placement import CopyPlacement, is_covered
from deadpool_megatron.layout.records import (
    BOUNDARIES,
    EpochRecord,
    Generation,
    RoleLayout,
    extras_part,
)


class Ledger:
    """Acknowledged copies of one epoch. Not thread-safe: the vault's lock guards it."""

    def __init__(self, record: EpochRecord) -> None:
        self._record = record
        self._seats = {role: seat.node for role, seat in record.seats.items()}
        self._domains = {node: address.domain for node, address in record.nodes.items()}
        self._placement = CopyPlacement.of_record(record)
        self._acknowledged: dict[tuple[int, Generation, int], set[str]] = {}
        self._owed: dict[int, dict[str, tuple[int, ...]]] = {}

    def buddies(self, layout: RoleLayout) -> tuple[int, ...]:
        """Nodes that keep copies of a role, in this epoch."""
        return self._placement.buddies(layout.role, layout.peers)

    def owed(self, layout: RoleLayout) -> dict[str, tuple[int, ...]]:
        """Part -> nodes that must hold it before it counts; empty when peers hold it anyway."""
        owed = self._owed.get(layout.role)
        if owed is None:
            buddies = self.buddies(layout)
            owed = self._owed[layout.role] = {
                part.name: () if self._covered(part.replicas, layout.role) else buddies
                for part in layout.parts
            }
        return owed

    def exposed(self, layout: RoleLayout) -> bool:
        """True when something has to be shipped and fewer buddies are left than are wanted."""
        return len(self.buddies(layout)) < self._record.replicas and not all(
            self._covered(part.replicas, layout.role) for part in layout.parts
        )

    def released(self, layout: RoleLayout) -> bool:
        """True when the record lets this role pass with fewer copies and it has to."""
        return layout.role in self._record.fewer_copies and self.exposed(layout)

    def acknowledge(
        self, role: int, generation: Generation, node: int, names: Iterable[str]
    ) -> None:
        """A buddy has sealed these parts."""
        self._acknowledged.setdefault((role, generation, node), set()).update(names)

    def missing(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str], node: int
    ) -> list[str]:
        """Sealed parts that ``node`` is owed and has not acknowledged, in layout order."""
        owed = self.owed(layout)
        done = self._acknowledged.get((layout.role, generation, node), set())
        return [n for n, nodes in owed.items() if n in sealed and node in nodes and n not in done]

    def boundary(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str]
    ) -> str | None:
        """The last boundary at which the generation is committed, or None."""
        if self.exposed(layout) and layout.role not in self._record.fewer_copies:
            return None
        owed = self.owed(layout)

        def safe(name: str) -> bool:
            return name in sealed and all(
                name in self._acknowledged.get((layout.role, generation, node), ())
                for node in owed[name]
            )

        if not all(safe(name) for name in layout.shard_parts):
            return None
        reached = None
        for boundary in BOUNDARIES:
            name = extras_part(boundary)
            if name in owed and name in sealed:
                if not safe(name):
                    break
                reached = boundary
        return reached

    def _covered(self, replicas: tuple[int, ...], role: int) -> bool:
        return is_covered(replicas, role, self._seats, self._domains, self._record.replicas)
