"""The planner: frozen inventories -> what to restore from where, and who plays which role. Pure.

Nothing here knows time, processes or connections, so every decision can be replayed from the
journal and tested by properties. Choosing the newest state that *all* roles can produce, instead of
each role's newest, is the consistency rule of coordinated checkpointing (Chandy, Lamport).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deadpool_megatron.layout.decision import (
    BadPart,
    NoRestore,
    RestoreQuery,
    Seating,
    SeatingQuery,
    is_kept,
)
from deadpool_megatron.layout.inventories import usual_layouts
from deadpool_megatron.layout.part_kinds import BOUNDARIES, extras_part
from deadpool_megatron.layout.records import (
    Decoding,
    Generation,
    Inventory,
    PartInfo,
    Recipe,
    Restore,
    RoleLayout,
    Seat,
    Source,
)
from deadpool_megatron.recovery.coded import CodedShelf
from deadpool_megatron.recovery.replays import replay


def choose_restore(query: RestoreQuery) -> Restore | NoRestore:
    """The newest state that every role can get back.

    In this order: newest generation in memory of which each role's shard parts and extras have a
    source, or can be decoded or recomputed as far as shard parts go; the durable checkpoint; the
    start of the run, if nothing was computed yet. A restore that is not from memory is a generation
    of the new epoch: the members seal it first.

    Memory that the checkpoint has overtaken by more generations than slots hold is of a host that
    left the run long ago, and not looked at.
    """
    shelf = _Shelf(query)
    refusals: list[str] = []
    for generation in sorted(shelf.generations, reverse=True):
        if shelf.is_overtaken(generation):
            break
        found = shelf.produce(generation)
        if isinstance(found, Restore):
            return found
        refusals.append(f"generation {generation.lineage}:{generation.iteration} lacks {found}")
    for fallback in (query.durable, query.start):
        if fallback is not None:
            return replace(
                fallback, generation=Generation(query.epoch, fallback.generation.iteration)
            )
    what = "; ".join(refusals[:3]) or f"{len(query.inventories)} live nodes hold no sealed state"
    return NoRestore(
        f"no generation can be restored for all {query.world_size} roles and there is no"
        f" durable checkpoint: {what}"
    )


def assign_seats(query: SeatingQuery) -> Seating:
    """Survivors keep their roles; the roles of a lost or leaving node move together to one spare.

    A member that died on a live node is replaced on its slot (its incarnation in ``members`` is
    the replacement's). A spare is a live node without a role that has every slot the block needs:
    the one with the most warm members there, then the lowest id.
    """
    seats: dict[int, Seat] = {}
    moving: dict[int, list[int]] = {}
    for role, seat in sorted(query.seats.items()):
        place = (seat.node, seat.slot)
        if place in query.members and seat.node not in query.leaving:
            seats[role] = Seat(*place, query.members[place])
        else:
            moving.setdefault(seat.node, []).append(role)
    taken = {seat.node for seat in seats.values()} | query.leaving
    unseated: list[int] = []
    for node, roles in sorted(moving.items()):
        slots = [query.seats[role].slot for role in roles]
        spare = _best_spare(query, slots, taken | {node})
        if spare is None:
            unseated += roles
            continue
        taken.add(spare)
        for role, slot in zip(roles, slots, strict=True):
            seats[role] = Seat(spare, slot, query.members[spare, slot])
    return Seating(dict(sorted(seats.items())), tuple(sorted(unseated)))


def _best_spare(query: SeatingQuery, slots: list[int], taken: set[int]) -> int | None:
    fitting = [
        node
        for node in {node for node, _ in query.members} - taken
        if all((node, slot) in query.members for slot in slots)
    ]

    def rank(node: int) -> tuple[bool, int, int]:
        warm = sum((node, slot) in query.warm for slot in slots)
        return (node in query.avoid, -warm, node)

    return min(fitting, key=rank, default=None)


class _Shelf:
    """All sealed parts on live nodes, as far as they may be used for the query."""

    def __init__(self, query: RestoreQuery) -> None:
        self._query = query
        self._layouts: dict[int, RoleLayout] = {}
        unknown = {role for role in range(query.world_size) if role not in query.layouts}
        found = usual_layouts(unknown, query.inventories.values())
        for role in range(query.world_size):
            layout = query.layouts.get(role) or found.get(role)
            if layout is not None:
                self._layouts[role] = layout
        # Generation, part, role -> nodes. One key of all three would be hashed a million times.
        self._holders: dict[Generation, dict[str, dict[int, list[int]]]] = {}
        for node, inventory in query.inventories.items():
            self._add(node, inventory)
        self._coded = CodedShelf(
            query.inventories.values(), self._layouts, query.bad_parts, self._whole_copies
        )

    @property
    def generations(self) -> set[Generation]:
        """Every generation of which any usable part exists."""
        return {generation for generation, parts in self._holders.items() if parts}

    def is_overtaken(self, generation: Generation) -> bool:
        """Whether the checkpoint is newer than the slots of a run that goes on could make it."""
        slots = max((layout.slots for layout in self._layouts.values()), default=0)
        durable, kept = self._query.durable, slots * self._query.every
        return durable is not None and durable.generation.iteration > generation.iteration + kept

    def produce(self, generation: Generation) -> Restore | str:
        """The restore of one generation, or what is missing for it."""
        sources: dict[int, dict[str, tuple[Source, ...]]] = {}
        recipes: dict[int, Recipe] = {}
        for role in range(self._query.world_size):
            layout = self._layouts.get(role)
            if layout is None:
                return f"the layout of role {role}"
            sources[role] = {}
            lacking: list[str] = []
            shard_parts = layout.shard_parts
            for part in layout.parts:
                if part.name in shard_parts:
                    found = sources[role][part.name] = self._sources(role, part, generation)
                    if not found:
                        lacking.append(part.name)
            if lacking:
                recipe = self._recipe(layout, lacking, generation)
                if isinstance(recipe, str):
                    return recipe
                recipes[role] = recipe
        return self._at_latest_boundary(generation, sources, recipes)

    def _recipe(
        self, layout: RoleLayout, lacking: list[str], generation: Generation
    ) -> Recipe | str:
        """How a role gets parts that nobody holds whole, or what is missing for it."""
        decodings, role = dict[str, Decoding](), layout.role
        for name in lacking:
            decoding = self._coded.decoding(role, name, generation)
            if decoding is not None:
                decodings[name] = decoding
        left = [name for name in lacking if name not in decodings]
        if not left:
            return Recipe(decodings)
        found = replay(layout, left, generation, self._holders, self._whole_copies)
        return f"part {left[0]} of role {role}" if found is None else Recipe(decodings, found)

    def _at_latest_boundary(
        self,
        generation: Generation,
        shards: Mapping[int, Mapping[str, tuple[Source, ...]]],
        recipes: Mapping[int, Recipe],
    ) -> Restore | str:
        lacking = ""
        for boundary in reversed(BOUNDARIES):
            part = PartInfo(extras_part(boundary), 0, ())
            sources: dict[int, dict[str, tuple[Source, ...]]] = {}
            for role, found in shards.items():
                extras = self._sources(role, part, generation)
                if not extras:
                    lacking = f"part {part.name} of role {role}"
                    break
                sources[role] = {**found, part.name: extras}
            else:
                return Restore("memory", generation, boundary, sources=sources, recipes=recipes)
        return lacking

    def _whole_copies(self, role: int, name: str, generation: Generation) -> tuple[Source, ...]:
        """Places of a part of any role of the run; none for a part that the role does not have."""
        layout = self._layouts.get(role)
        parts = layout.parts if layout is not None else ()
        part = next((part for part in parts if part.name == name), None)
        return () if part is None else self._sources(role, part, generation)

    def _sources(self, role: int, part: PartInfo, generation: Generation) -> tuple[Source, ...]:
        """New seat's node, previous owner's node, buddies, then the same of each replica role."""
        holders = self._holders[generation].get(part.name, {})
        found = [Source(node, role) for node in self._nearest(role, holders.get(role, []))]
        for other in part.replicas:
            layout = self._layouts.get(other)
            if other != role and layout is not None and layout.has(part):
                nodes = self._nearest(role, holders.get(other, []))
                found += [Source(node, other) for node in nodes]
        return tuple(found)

    def _nearest(self, role: int, nodes: list[int]) -> list[int]:
        """Own node, previous owner's, then others cyclically, so that not all ask the same one."""
        if len(nodes) < 2:
            return nodes
        own, owner = self._query.seats.get(role), self._query.owners.get(role)
        start = owner.node if owner is not None else role

        def rank(node: int) -> tuple[bool, bool, bool, int]:
            return (not _is_on(own, node), not _is_on(owner, node), node < start, node)

        return sorted(nodes, key=rank)

    def _add(self, node: int, inventory: Inventory) -> None:
        """Holdings on the kept line, of the right layout, without parts that are known bad."""
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
                if query.bad_parts and BadPart(node, role, generation, part) in query.bad_parts:
                    continue
                nodes = holders.setdefault(part, {}).setdefault(role, [])
                if node not in nodes:
                    nodes.append(node)


def _is_on(seat: Seat | None, node: int) -> bool:
    return seat is not None and seat.node == node
