"""Recompute: generations are sent whole at intervals, as steps in between (layout.gradient_chain).

A generation is sent as a step if its predecessor was made in this epoch (or was restored by it),
the last whole generation is less than ``full_every`` back, the member's rehearsal has shown that a
replay gives the same bytes, and the member has kept the step. All others are sent whole; so is a
generation whose step the buddy cannot use. A restarted vault begins with a whole generation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.layout import records
from deadpool_megatron.layout.gradient_chain import chain, key, pack_sums, unpack_sums
from deadpool_megatron.layout.records import (
    SUMS_PART,
    UPDATE_PART,
    Generation,
    PartKind,
    Recipe,
    Source,
)
from deadpool_megatron.vault.copies import Copies, Owed
from deadpool_megatron.vault.schemes.registry import Obtained, Rebuild
from deadpool_megatron.vault.shm.segment import PartState, Segment, checksum
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore


@dataclass
class _Way:
    """The chain of a role so far; ``steps``: generation -> its predecessor."""

    base: Generation
    newest: Generation
    steps: dict[Generation, Generation] = field(default_factory=dict)


class Recompute(Copies):
    """Steps between whole copies. A generation that an epoch restores is the base of every role's
    chain."""

    def __init__(self, record: records.EpochRecord, rehearsed: Collection[int]) -> None:
        super().__init__(record)
        self._rehearsed = rehearsed
        self._chains: dict[int, _Way] = {}
        if record.restore.kind in ("memory", "dump"):
            restored = record.restore.generation
            self._chains = {role: _Way(restored, restored) for role in record.seats}

    def owed(self, layout: records.RoleLayout, generation: Generation) -> Owed:
        is_step = self.follows(layout.role, generation) is not None
        return self._sized(layout, PartKind.STEP if is_step else PartKind.SHARD)

    def sealing(self, segment: Segment, slot: int, digests: dict[str, int]) -> None:
        """Add the checksums of the resulting shard parts to a step that the member has kept."""
        layout, generation = segment.layout, segment.generation(slot)
        if not set(digests) >= set(layout.shard_parts):
            return  # extras that were appended
        has_step = UPDATE_PART in digests and segment.entry(slot, UPDATE_PART).nbytes > 0
        if UPDATE_PART in digests and generation != self.record.restore.generation:
            sums = {n: (segment.entry(slot, n).nbytes, digests[n]) for n in layout.shard_parts}
            payload = pack_sums(sums)
            view = segment.data(slot, SUMS_PART, len(payload))
            view[:] = payload
            segment.fill_part(slot, SUMS_PART, len(payload), self.record.epoch)
            digests[SUMS_PART] = checksum(view)
        self.decide(layout, generation, has_step)

    def lacks_base(
        self, held: Mapping[Generation, Collection[str]], follows: Any, names: Collection[str]
    ) -> bool:
        shards = [shard for name in names if (shard := records.shard_of(name)) is not None]
        if not shards or follows is None:
            return bool(shards)
        before = Generation.from_list(follows)
        return not all(chain(held, before, shard) for shard in shards)

    def decide(self, layout: records.RoleLayout, generation: Generation, has_step: bool) -> None:
        """Decide whether a new generation is sent whole; ``has_step``: the member has its step."""
        way = self._chains.get(layout.role)
        if way is None:
            self._chains[layout.role] = _Way(generation, generation)
            return
        oldest = generation.iteration - layout.slots  # older generations are not tracked any more
        way.steps = {g: f for g, f in way.steps.items() if g.iteration > oldest}
        if (
            has_step
            and layout.role in self._rehearsed
            and way.newest.iteration == generation.iteration - 1
            and generation.iteration - way.base.iteration < self.record.protection.scheme.full_every
        ):
            way.steps[generation] = way.newest
        else:
            way.base = generation
        way.newest = generation

    def follows(self, role: int, generation: Generation) -> Generation | None:
        way = self._chains.get(role)
        return None if way is None else way.steps.get(generation)

    def make_whole(self, role: int, generation: Generation) -> None:
        way = self._chains.get(role)
        if way is not None and way.steps.pop(generation, None) is not None:
            way.base = max(way.base, generation)


class Replayed(Rebuild):
    """A role that recomputes its shard parts from a whole copy of an earlier generation and the
    steps since. See :class:`.registry.Rebuild`."""

    def __init__(self, store: SlotStore, record: records.EpochRecord, role: int) -> None:
        self._store = store
        self._epoch = record.epoch
        self._restored = record.restore.generation
        self._role = role

    def chain(self, recipe: Recipe) -> Mapping[Generation, Mapping[str, tuple[Source, ...]]]:
        return {} if recipe.replay is None else recipe.replay.sources

    def accepts(
        self, segment: Segment, slot: int, digests: Mapping[str, int], obtained: Obtained
    ) -> bool:
        """Return whether recomputed shard parts equal the owner's; others are invalidated.

        The member has compared them too, but the vault seals only bytes that it has checked (rule
        4).
        """
        sums = (obtained or {}).get(key(self._restored, SUMS_PART))
        if sums is None:
            return False
        with self._store.gate.lock:  # after a close the slot may be that of the next epoch
            is_open = self._store.gate.is_open(self._epoch)
            wrong = replayed_otherwise(segment, slot, digests, sums) if is_open else []
        if wrong:
            self._store.reports.refuse("a replay with other bytes", role=self._role, part=wrong[0])
            self._store.on_bad(self._epoch, self._role, self._restored, wrong[0])
        return not wrong


def replayed_otherwise(
    segment: Segment, slot: int, digests: Mapping[str, int], sums: Place
) -> list[str]:
    """Invalidate the recomputed shard parts that differ from the owner's by ``sums``, and return
    their names."""
    had, shards = unpack_sums(sums.view), segment.layout.shard_parts
    wrong = [
        name for name in shards if name in digests and had.get(name, (0, -1))[1] != digests[name]
    ]
    for name in wrong:
        segment.invalidate_part(slot, name, PartState.BAD)
    return wrong
