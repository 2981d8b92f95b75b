"""Which generations of the roles seated here travel whole, and which as steps (layout.replaying).

A generation travels as a step if the one before it was made in this epoch (or was restored by it),
the last whole one is less than ``full_every`` back, the member's rehearsal has shown that a replay
gives the very bytes, and the member has kept the step. Everything else travels whole; so does a
generation whose step the buddy cannot use. Nothing is remembered that matters: a vault that was
restarted begins with a whole generation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.layout.part_kinds import SUMS_PART, UPDATE_PART, PartKind, kind_of, shard_of
from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout
from deadpool_megatron.layout.replaying import chain, keeps_steps, pack_sums
from deadpool_megatron.layout.schemes import recomputes
from deadpool_megatron.vault.shm.segment import Segment, checksum
from deadpool_megatron.vault.shm.table import SealedSlot


@dataclass
class _Way:
    """How far a role has come; ``steps``: generation -> the one that it follows."""

    base: Generation
    newest: Generation
    steps: dict[Generation, Generation] = field(default_factory=dict)


class Steps:
    """Of all roles seated on one node. Not thread-safe: the vault's lock guards it."""

    def __init__(self) -> None:
        self._record: EpochRecord | None = None
        self._trusted: set[int] = set()
        self._ways: dict[int, _Way] = {}

    def begin(self, record: EpochRecord) -> None:
        """A new epoch: what it restores from memory is the base of every role's chain."""
        self._record = record
        self._ways = {}
        if record.restore.kind in ("memory", "dump"):
            restored = record.restore.generation
            self._ways = {role: _Way(restored, restored) for role in record.seats}

    def trust(self, role: int, matched: bool) -> None:
        """What the rehearsal of the role's member has shown."""
        (self._trusted.add if matched else self._trusted.discard)(role)

    def sealed(self, segment: Segment, slot: int, names: Collection[str]) -> None:
        """Parts ``names`` of a member's slot have been sealed; decides how they travel."""
        layout = segment.layout
        if not set(names) >= set(layout.shard_parts):
            return  # extras that were appended
        has_step = UPDATE_PART in names and segment.entry(slot, UPDATE_PART).nbytes > 0
        self.decide(layout, segment.generation(slot), has_step)

    def decide(self, layout: RoleLayout, generation: Generation, has_step: bool) -> None:
        """How a new generation travels; ``has_step``: the member has kept what led to it."""
        way = self._ways.get(layout.role)
        if way is None:
            self._ways[layout.role] = _Way(generation, generation)
            return
        oldest = generation.iteration - layout.slots  # no older one is tracked any more
        way.steps = {g: f for g, f in way.steps.items() if g.iteration > oldest}
        if (
            has_step
            and layout.role in self._trusted
            and way.newest.iteration == generation.iteration - 1
            and generation.iteration - way.base.iteration < self._full_every(layout)
        ):
            way.steps[generation] = way.newest
        else:
            way.base = generation
        way.newest = generation

    def follows(self, role: int, generation: Generation) -> Generation | None:
        """The generation that a step leads from; None for one that travels whole."""
        way = self._ways.get(role)
        return None if way is None else way.steps.get(generation)

    def make_whole(self, role: int, generation: Generation) -> None:
        """A buddy lacks what the step of ``generation`` leads from."""
        way = self._ways.get(role)
        if way is not None and way.steps.pop(generation, None) is not None:
            way.base = max(way.base, generation)

    def counts(self, layout: RoleLayout, generation: Generation, name: str) -> bool:
        """Whether part ``name`` of a generation has to reach the buddies."""
        step = self.follows(layout.role, generation) is not None
        kind = kind_of(name)
        return kind is PartKind.EXTRAS or step == (kind is PartKind.STEP)

    def _full_every(self, layout: RoleLayout) -> int:
        """1 when every generation travels whole."""
        plan = self._record.protection if self._record is not None else None
        if plan is None or not recomputes(plan) or not keeps_steps(layout):
            return 1
        return plan.scheme.full_every


def lacks_base(slots: Iterable[SealedSlot], follows: Any, names: Iterable[str]) -> bool:
    """Whether this node does not hold all that the offered parts of a step begin from.

    ``slots``: of the role, here; ``follows``: the generation that the step leads from (JSON form).
    """
    shards = [shard for name in names if (shard := shard_of(name)) is not None]
    if not shards or follows is None:
        return bool(shards)
    held: dict[Generation, set[str]] = {}
    for slot in slots:
        held.setdefault(slot.generation, set()).update(slot.parts)
    before = Generation.from_list(follows)
    return not all(chain(held, before, shard) for shard in shards)


def write_sums(segment: Segment, slot: int, digests: dict[str, int], epoch: int) -> None:
    """Beside a step that a member has kept: what the shard parts have become by it.

    ``digests``: checksums of the parts that are about to be sealed; that of the sums is added.
    """
    shards = segment.layout.shard_parts
    if not {UPDATE_PART, *shards} <= set(digests):
        return
    sums = {name: (segment.entry(slot, name).nbytes, digests[name]) for name in shards}
    payload = pack_sums(sums)
    view = segment.data(slot, SUMS_PART, len(payload))
    view[:] = payload
    segment.fill_part(slot, SUMS_PART, len(payload), epoch)
    digests[SUMS_PART] = checksum(view)
