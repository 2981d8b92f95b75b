"""The planner: frozen inventories -> the restore, its sources, and the seats of the roles. Pure.

Nothing here knows time, processes or connections, so every decision can be replayed from the
journal and tested by properties. Choosing the newest state that *all* roles can produce, instead of
each role's newest, is the consistency rule of coordinated checkpointing (Chandy, Lamport).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from deadpool_megatron.layout import records
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.ranks import SIZE_STEP, first_role, rank_of
from deadpool_megatron.layout.records import Generation, Recipe, Restore, RoleLayout, Seat, Source
from deadpool_megatron.layout.sizes import Sizes

if TYPE_CHECKING:
    from deadpool_megatron.layout.parity_groups import ParityIndex

# Node and local rank of a member.
Place = tuple[int, int]


@dataclass(frozen=True)
class RestoreQuery:
    """The facts from which a restore is chosen.

    ``roles``: all roles of the epoch to open. ``inventories``: frozen inventories of live nodes.
    ``seats``: the seats of the epoch to open (roles may be missing while a spare is awaited);
    ``owners``: the seats of the closed epoch. ``layouts``: as registered by the members; a layout
    that is missing here is looked up in the inventories. ``kept``: lineage -> last iteration that
    is kept (:func:`keep_lineages`). ``durable``: the newest valid checkpoint (path, boundary,
    iteration). ``start``: the first state of the run, as long as no role ever got further than
    that, else None. ``every``: iterations from one protected generation to the next. ``sizes``: the
    sizes of an elastic run, where state of another size can be used.
    """

    epoch: int
    roles: Collection[int]
    inventories: Mapping[int, records.Inventory]
    seats: Mapping[int, Seat]
    owners: Mapping[int, Seat]
    kept: Mapping[int, int]
    layouts: Mapping[int, RoleLayout] = field(default_factory=dict)
    bad_parts: frozenset[records.BadPart] = frozenset()
    bad_generations: frozenset[Generation] = frozenset()
    durable: Restore | None = None
    start: Restore | None = None
    every: int = 1
    sizes: Sizes | None = None


@dataclass(frozen=True)
class NoRestore:
    """The reason why the run has no state to continue from: one line for people."""

    reason: str


@dataclass(frozen=True)
class Seating:
    """The new seats, and the roles for which no member is left."""

    seats: Mapping[int, Seat]
    unseated: tuple[int, ...] = ()


def choose_restore(query: RestoreQuery) -> Restore | NoRestore:
    """Return the newest state that every role can get back.

    The newest generation in memory comes first. Each role's extras must have a source; its shard
    parts must have a source, be decodable from parity blocks, or be cut from parts of another size.
    Then come the durable checkpoint, and the start of the run, if nothing was computed yet. A
    restore that is not from memory is a generation of the new epoch: the members seal it first.

    A generation that is older than the checkpoint by more than the slots hold is ignored: it is on
    a host that left the run long ago.
    """
    index = PartIndex(query)
    refusals: list[str] = []
    for generation in sorted(index.generations, reverse=True):
        if index.is_overtaken(generation):
            break
        answer = index.produce(generation)
        if isinstance(answer, Restore):
            return answer
        refusals.append(f"generation {generation.lineage}:{generation.iteration} lacks {answer}")
    for fallback in (query.durable, query.start):
        if fallback is not None:
            return replace(
                fallback, generation=Generation(query.epoch, fallback.generation.iteration)
            )
    reason = "; ".join(refusals[:3]) or "no live node holds a sealed state"
    return NoRestore(
        f"no generation can be restored for all {len(query.roles)} roles and there is no"
        f" durable checkpoint: {reason}"
    )


def assign_seats(
    seats: Mapping[int, Seat],
    members: Mapping[Place, int],
    *,
    warm: frozenset[Place] = frozenset(),
    leaving: frozenset[int] = frozenset(),
    deprioritized: frozenset[int] = frozenset(),
) -> Seating:
    """Keep the roles of survivors, and move those of each lost or leaving node to one spare.

    ``seats``: the seats of the last epoch, or the planned seats of the first. ``members``: the
    incarnation of every member on a live node; each member runs or is being started. A member that
    died on a live node is replaced in its place (its incarnation in ``members`` is that of the
    replacement). ``warm``: members that have built. ``leaving``: live nodes that must lose their
    roles. ``deprioritized``: live nodes that take roles only when no other spare is left.

    A spare is a live node without roles that has every local rank of the roles to move. The spare
    with the most warm members at these local ranks is chosen, then the lowest id.
    """
    new_seats: dict[int, Seat] = {}
    roles_to_move: dict[int, list[int]] = {}
    for role, seat in sorted(seats.items()):
        place = (seat.node, seat.local_rank)
        if place in members and seat.node not in leaving:
            new_seats[role] = Seat(*place, members[place])
        else:
            roles_to_move.setdefault(seat.node, []).append(role)
    used_nodes = {seat.node for seat in new_seats.values()} | leaving
    unseated: list[int] = []
    for node, roles in sorted(roles_to_move.items()):
        ranks = [seats[role].local_rank for role in roles]

        def order(spare: int, ranks: list[int] = ranks) -> tuple[bool, int, int]:
            warm_count = sum((spare, local_rank) in warm for local_rank in ranks)
            return spare in deprioritized, -warm_count, spare

        candidates = [
            spare
            for spare in {spare for spare, _ in members} - used_nodes - {node}
            if all((spare, local_rank) in members for local_rank in ranks)
        ]
        if not candidates:
            unseated += roles
            continue
        spare = min(candidates, key=order)
        used_nodes.add(spare)
        for role, local_rank in zip(roles, ranks, strict=True):
            new_seats[role] = Seat(spare, local_rank, members[spare, local_rank])
    return Seating(dict(sorted(new_seats.items())), tuple(sorted(unseated)))


def keep_lineages(kept: Mapping[int, int], restore: Restore, epoch: int) -> dict[int, int]:
    """Return the kept lineages, each with its last iteration, after ``epoch`` was opened from
    ``restore``; other lineages are abandoned.

    A run that was set back to generation (1, 7) in epoch 3 keeps lineage 1 up to iteration 7, drops
    lineage 2, and continues in lineage 3. State that did not come from memory keeps nothing older.
    """
    lineages = {epoch: NO_LIMIT}
    if restore.kind == "memory":
        newest = restore.generation
        for lineage, last in kept.items():
            if lineage <= newest.lineage:
                lineages[lineage] = min(last, newest.iteration)
    return lineages


def is_kept(kept: Mapping[int, int], generation: Generation) -> bool:
    """Return whether a generation belongs to a kept lineage."""
    return generation.iteration <= kept.get(generation.lineage, -1)


def is_rolled_back(generation: Generation, nonfinite: Mapping[int, int]) -> bool:
    """Return whether a checkpoint contains the update of any ``nonfinite`` iteration
    (:class:`History`), which a rollback has undone. The files of a checkpoint do not show that.
    """
    return any(
        generation.iteration >= bad and generation.lineage <= lineage
        for bad, lineage in nonfinite.items()
    )


class PartIndex:
    """The sealed parts in the inventories that may be used for the query."""

    def __init__(self, query: RestoreQuery) -> None:
        self._query = query
        others = (range(first, first + count) for first, count in self._other_sizes)
        unknown = {*query.roles, *chain.from_iterable(others)} - query.layouts.keys()
        common = common_layouts(unknown, query.inventories.values())
        self._layouts: dict[int, RoleLayout] = {**common, **query.layouts}
        # Generation, part, role -> nodes. One key of all three would be hashed a million times.
        self._holders: dict[Generation, dict[str, dict[int, list[int]]]] = {}
        for node, inventory in query.inventories.items():
            self._add(node, inventory)

    @property
    def generations(self) -> set[Generation]:
        """Return every generation with a usable part."""
        return {generation for generation, parts in self._holders.items() if parts}

    def is_overtaken(self, generation: Generation) -> bool:
        """Return whether the checkpoint is newer by more generations than slots can hold."""
        slots = max((layout.slots for layout in self._layouts.values()), default=0)
        durable, reach = self._query.durable, slots * self._query.every
        return durable is not None and durable.generation.iteration > generation.iteration + reach

    def produce(self, generation: Generation) -> Restore | str:
        """Return the restore of a generation, or the name of a part or layout that is missing."""
        answer = self._produce(generation, self._query.roles)
        for first, count in self._other_sizes if isinstance(answer, str) else ():
            old = self._produce(generation, range(first, first + count))
            if isinstance(old, Restore) and self._are_divisible(old.sources):
                return self._cut(old, first, count)
        return answer

    @cached_property
    def _other_sizes(self) -> list[tuple[int, int]]:
        """Return the first role of each other size, and the number of its roles."""
        sizes = self._query.sizes
        if sizes is None:
            return []
        roles, ranks = self._query.roles, sizes.ranks_per_replica
        end = first_role(min(roles)) + SIZE_STEP * (len(roles) // ranks)
        all_sizes = [(end - SIZE_STEP * n, n * ranks) for n in reversed(sizes.replicas)]
        return [(first, count) for first, count in all_sizes if count != len(roles)]

    def _are_divisible(self, roles: Iterable[int]) -> bool:
        return all(self._layouts[role].shard_map.nbytes for role in roles)

    def _cut(self, old: Restore, first: int, count: int) -> Restore:
        """Return the restore of the query's roles from the restore ``old`` of another size, with
        ``count`` roles from ``first`` on. It has the sources and recipes of both sizes.

        Each recipe lists all old roles with parts of the role's slice, as only vaults have the
        shard maps, which show the parts that are really needed.
        """
        sizes, extras = self._query.sizes, records.extras_part(old.boundary)
        assert sizes is not None
        sources, recipes = dict(old.sources), dict(old.recipes)
        new_size, old_size = (n // sizes.ranks_per_replica for n in (len(self._query.roles), count))
        for role in self._query.roles:
            donor, grid = sizes.grid.donor(rank_of(role), new_size, old_size), sizes.grid
            peers = {*grid.data_peers(donor, old_size), *grid.expert_data_peers(donor, old_size)}
            layouts = [self._layouts[first + rank] for rank in sorted(peers)]
            recipes[role] = Recipe(cut={layout.role: layout.layout_hash for layout in layouts})
            sources[role] = {extras: old.sources[first + donor][extras]}
        return replace(old, sources=sources, recipes=recipes)

    def _produce(self, generation: Generation, roles: Iterable[int]) -> Restore | str:
        """Return the restore for roles of one size, or the name of a part or layout it lacks."""
        sources: dict[int, dict[str, tuple[Source, ...]]] = {}
        recipes: dict[int, Recipe] = {}
        for role in roles:
            layout = self._layouts.get(role)
            if layout is None:
                return f"the layout of role {role}"
            shards = layout.shard_parts
            places = {
                part.name: self._sources(role, part, generation)
                for part in layout.parts
                if part.name in shards
            }
            sources[role] = places
            if missing_parts := [name for name, nodes in places.items() if not nodes]:
                recipe = self._recipe(layout, missing_parts, generation)
                if isinstance(recipe, str):
                    return recipe
                recipes[role] = recipe
        return self._at_latest_boundary(generation, sources, recipes)

    def recipe(self, layout: RoleLayout, generation: Generation) -> Recipe | None:
        """Return the recipe for the parts of a role that no node holds whole; None if
        impossible."""
        copies, role = self._whole_copies, layout.role
        missing_parts = [name for name in layout.shard_parts if not copies(role, name, generation)]
        answer = self._recipe(layout, missing_parts, generation)
        return answer if isinstance(answer, Recipe) else None

    def alternatives(self, role: int, part: str, generation: Generation) -> list[Recipe]:
        """Return the ways to produce one part by itself, the best first."""
        index = self._parity
        decodings = [] if index is None else index.decodings(role, part, generation)
        return [Recipe({part: decoding}) for decoding in decodings]

    def _recipe(
        self, layout: RoleLayout, missing_parts: list[str], generation: Generation
    ) -> Recipe | str:
        """Return the recipe for parts that no node holds whole, or the name of a part that cannot
        be decoded."""
        recipe = Recipe()
        for name in missing_parts:
            ways = self.alternatives(layout.role, name, generation)
            if not ways:
                return f"part {name} of role {layout.role}"
            recipe = replace(recipe, decodings={**recipe.decodings, **ways[0].decodings})
        return recipe

    @cached_property
    def _parity(self) -> ParityIndex | None:
        """The parity blocks of any plan; None, without an import, where the nodes have none."""
        held = self._query.inventories.values()
        if not any(records.is_parity_role(each.role) for found in held for each in found.layouts):
            return None
        from deadpool_megatron.layout.parity_groups import ParityIndex

        return ParityIndex(held, self._layouts, self._query.bad_parts, self._whole_copies)

    def _at_latest_boundary(
        self,
        generation: Generation,
        shards: Mapping[int, Mapping[str, tuple[Source, ...]]],
        recipes: Mapping[int, Recipe],
    ) -> Restore | str:
        """Return the restore at the latest boundary whose extras all roles have, or the name of a
        missing part."""
        missing_part = ""
        for boundary in reversed(records.BOUNDARIES):
            part = records.PartInfo(records.extras_part(boundary), 0, ())
            sources: dict[int, dict[str, tuple[Source, ...]]] = {}
            for role, places in shards.items():
                extras = self._sources(role, part, generation)
                if not extras:
                    missing_part = f"part {part.name} of role {role}"
                    break
                sources[role] = {**places, part.name: extras}
            else:
                return Restore("memory", generation, boundary, sources=sources, recipes=recipes)
        return missing_part

    def _whole_copies(self, role: int, name: str, generation: Generation) -> tuple[Source, ...]:
        """Return the places of a part of any role; none for a part that the role does not have."""
        layout = self._layouts.get(role)
        parts = layout.parts if layout is not None else ()
        part = next((part for part in parts if part.name == name), None)
        return () if part is None else self._sources(role, part, generation)

    def _sources(
        self, role: int, part: records.PartInfo, generation: Generation
    ) -> tuple[Source, ...]:
        """Return the nodes that hold a part: the node of the new seat, the previous owner's,
        buddies, then the nodes that hold it for a replica."""
        holders = self._holders.get(generation, {}).get(part.name, {})
        sources = [Source(node, role) for node in self._nearest(role, holders.get(role, []))]
        for other in part.replicas:
            layout = self._layouts.get(other)
            if other != role and layout is not None and layout.has(part):
                nodes = self._nearest(role, holders.get(other, []))
                sources += [Source(node, other) for node in nodes]
        return tuple(sources)

    def _nearest(self, role: int, nodes: list[int]) -> list[int]:
        """Sort the node of the role and the previous owner first, then the others in cyclic order
        from the owner, so that not all roles ask the same node."""
        if len(nodes) < 2:
            return nodes
        own, owner = self._query.seats.get(role), self._query.owners.get(role)
        start = owner.node if owner is not None else role

        def rank(node: int) -> tuple[bool, bool, bool, int]:
            return (not _is_on(own, node), not _is_on(owner, node), node < start, node)

        return sorted(nodes, key=rank)

    def _add(self, node: int, inventory: records.Inventory) -> None:
        """Add the holdings of kept lineages with the right layout, except parts known as bad."""
        hashes = {layout.role: layout.layout_hash for layout in inventory.layouts}
        query = self._query
        for holding in inventory.holdings:
            role, generation = holding.role, holding.generation
            layout = self._layouts.get(role)
            if layout is None or hashes.get(role) != layout.layout_hash:
                continue
            if generation in query.bad_generations or not is_kept(query.kept, generation):
                continue
            holders = self._holders.setdefault(generation, {})
            for part in holding.parts:
                bad = query.bad_parts and records.BadPart(node, role, generation, part)
                if bad and bad in query.bad_parts:
                    continue
                nodes = holders.setdefault(part, {}).setdefault(role, [])
                if node not in nodes:
                    nodes.append(node)


def _is_on(seat: Seat | None, node: int) -> bool:
    return seat is not None and seat.node == node


def common_layouts(
    roles: set[int], inventories: Iterable[records.Inventory]
) -> dict[int, RoleLayout]:
    """Return the most frequent layout of each role in the inventories, which contain the layouts
    of copies too."""
    by_role: dict[int, list[RoleLayout]] = {}
    if roles:
        for layout in (layout for inventory in inventories for layout in inventory.layouts):
            if layout.role in roles:
                by_role.setdefault(layout.role, []).append(layout)
    return {role: _majority(layouts) for role, layouts in by_role.items()}


def _majority(layouts: list[RoleLayout]) -> RoleLayout:
    counts = Counter(layout.layout_hash for layout in layouts)
    return max(layouts, key=lambda layout: (counts[layout.layout_hash], layout.layout_hash))
