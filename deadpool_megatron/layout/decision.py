"""Questions and answers between the coordinator's state machine and the planner. Pure data.

The machine (cluster) asks, the planner (recovery) answers; neither imports the other, both know
these types. ``Part`` exclusions and the kept line are what earlier decisions leave behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.records import Generation, Inventory, Restore, RoleLayout, Seat


@dataclass(frozen=True, order=True)
class BadPart:
    """Bytes found wrong: ``part`` of ``generation``, sealed under ``role`` on ``node``."""

    node: int
    role: int
    generation: Generation
    part: str

    def to_list(self) -> list[Any]:
        """JSON form for who knows the node."""
        return [self.role, self.generation.to_list(), self.part]

    @staticmethod
    def from_list(node: int, values: Sequence[Any]) -> BadPart:
        """Inverse of :meth:`to_list`. Raises TypeError or ValueError for anything else."""
        role, generation, part = values
        return BadPart(node, int(role), Generation.from_list(generation), str(part))


@dataclass(frozen=True)
class RestoreQuery:
    """What is known when a restore has to be chosen.

    ``inventories``: frozen, of live nodes only. ``seats``: of the epoch to open (roles may be
    missing while a spare is awaited); ``owners``: seats of the epoch that was closed. ``layouts``:
    as registered by the members; a role that is missing here is looked up in the inventories.
    ``kept``: lineage -> last iteration that was not abandoned (:func:`keep_line`). ``durable``: the
    newest valid checkpoint (its path, boundary and iteration). ``start``: what the run began with,
    as long as no role ever got further than that, else None. ``every``: iterations from one
    protected generation to the next.
    """

    epoch: int
    world_size: int
    inventories: Mapping[int, Inventory]
    seats: Mapping[int, Seat]
    owners: Mapping[int, Seat]
    kept: Mapping[int, int]
    layouts: Mapping[int, RoleLayout] = field(default_factory=dict)
    bad_parts: frozenset[BadPart] = frozenset()
    bad_generations: frozenset[Generation] = frozenset()
    durable: Restore | None = None
    start: Restore | None = None
    every: int = 1


@dataclass(frozen=True)
class NoRestore:
    """There is nothing to go on from; ``reason`` is one clear line for people."""

    reason: str


@dataclass(frozen=True)
class SeatingQuery:
    """Who could play which role.

    ``seats``: of the last epoch (at the start: the wished ones). ``members``: incarnation of every
    member on a live node, by (node, slot); all of them run or are being started. ``warm``: members
    that have built. ``leaving``: live nodes that must lose their roles. ``avoid``: live nodes that
    take roles only when no other spare is left.
    """

    seats: Mapping[int, Seat]
    members: Mapping[tuple[int, int], int]
    warm: frozenset[tuple[int, int]] = frozenset()
    leaving: frozenset[int] = frozenset()
    avoid: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Seating:
    """The new seats, and the roles for which no member is left."""

    seats: Mapping[int, Seat]
    unseated: tuple[int, ...] = ()


class Planner(Protocol):
    """The decisions, as pure functions."""

    def choose_restore(self, query: RestoreQuery) -> Restore | NoRestore:
        """Where the state of the next epoch comes from."""

    def assign_seats(self, query: SeatingQuery) -> Seating:
        """Which member plays which role in the next epoch."""


def keep_line(kept: Mapping[int, int], restore: Restore, epoch: int) -> dict[int, int]:
    """The kept line after ``epoch`` was opened from ``restore``; the rest is abandoned for good.

    A run that was set back to generation (1, 7) in epoch 3 keeps lineage 1 up to iteration 7, drops
    lineage 2, and goes on in lineage 3. State that did not come from memory keeps nothing older.
    """
    line = {epoch: NO_LIMIT}
    if restore.kind == "memory":
        newest = restore.generation
        for lineage, last in kept.items():
            if lineage <= newest.lineage:
                line[lineage] = min(last, newest.iteration)
    return line


def is_kept(kept: Mapping[int, int], generation: Generation) -> bool:
    """Whether a generation lies on the kept line."""
    return generation.iteration <= kept.get(generation.lineage, -1)


def is_thrown_away(generation: Generation, nonfinite: Mapping[int, int]) -> bool:
    """Whether a checkpoint has the update in it that a rollback has taken back, of one of the
    ``nonfinite`` iterations (:class:`History`). Nothing in its files says so.
    """
    return any(
        generation.iteration >= bad and generation.lineage <= lineage
        for bad, lineage in nonfinite.items()
    )
