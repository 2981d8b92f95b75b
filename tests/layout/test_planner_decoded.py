"""Parts without a whole copy: from enough blocks."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.layout import history, records, schemes
from deadpool_megatron.layout.parity_groups import INPUTS, ParityPlacement, parity_role
from deadpool_megatron.layout.planner import NoRestore, RestoreQuery, choose_restore
from tests.layout.held import chosen

EXTRAS = records.extras_part("step")
OLD, NEW = records.Generation(1, 6), records.Generation(1, 7)


def layout(role: int, parts: tuple[str, ...] = ("main",)) -> records.RoleLayout:
    own = (role,)
    shards = [records.PartInfo(name, 8 + role, own) for name in parts]
    return records.RoleLayout(
        role, (*shards, records.PartInfo(EXTRAS, 8, own)), (0, 1), 2, f"hash{role}"
    )


@dataclass
class World:
    """Roles 0, 1, ... on nodes; ``held``: node -> {(role, generation, part)}."""

    seats: dict[int, int]
    nodes: int
    group: int
    parities: int
    parts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    held: dict[int, set[tuple[int, records.Generation, str]]] = field(default_factory=dict)
    layouts: dict[int, records.RoleLayout] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    bad: set[records.BadPart] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.layouts = {role: layout(role, self.parts.get(role, ("main",))) for role in self.seats}
        self.held = {node: set() for node in range(self.nodes)}
        self.placement = self.place(self.group)
        self.protect(self.placement, (OLD, NEW))

    def place(self, group: int, parities: int | None = None) -> ParityPlacement:
        plan = schemes.ProtectionPlan(schemes.SchemeNumbers(schemes.SchemeKind.PARITY, group=group))
        domains = {node: f"rack{node}" for node in range(self.nodes)}
        spares = set(domains) - set(self.seats.values())
        return ParityPlacement(self.seats, domains, spares, plan, parities or self.parities)

    def protect(
        self, placement: ParityPlacement, generations: tuple[records.Generation, ...]
    ) -> None:
        """Every role's own slot, its extras on all nodes, and the parity of its group."""
        for generation in generations:
            for role, node in self.seats.items():
                for name in self.layouts[role].shard_parts:
                    self.held[node].add((role, generation, name))
                for other in self.held:
                    self.held[other].add((role, generation, EXTRAS))
            for group in placement.groups:
                for block, holder in zip(group.blocks, group.holders, strict=True):
                    self.layouts[block] = placement.layout(block, self.layouts)
                    for part in self.layouts[block].parts:
                        self.held[holder].add((block, generation, part.name))

    def ask(self) -> RestoreQuery:
        inventories = {}
        for node, held in self.held.items():
            if node in self.lost:
                continue
            parts: dict[tuple[int, records.Generation], set[str]] = {}
            for role, generation, name in held:
                parts.setdefault((role, generation), set()).add(name)
            holdings = [
                records.Holding(*key, frozenset(names)) for key, names in sorted(parts.items())
            ]
            found = [self.layouts[role] for role in sorted({role for role, _ in parts})]
            inventories[node] = records.Inventory(node, 1, tuple(holdings), tuple(found))
        seats = {role: records.Seat(node, role, 0) for role, node in self.seats.items()}
        return RestoreQuery(
            2,
            seats,
            inventories,
            seats,
            seats,
            {1: history.NO_LIMIT},
            bad_parts=frozenset(self.bad),
        )

    def sources(self, role: int, generation: records.Generation, name: str) -> set[records.Source]:
        """Places of intact bytes on live nodes."""
        return {
            records.Source(node, role)
            for node, held in self.held.items()
            if node not in self.lost
            and (role, generation, name) in held
            and records.BadPart(node, role, generation, name) not in self.bad
        }

    def blocks(
        self, role: int, generation: records.Generation, name: str
    ) -> dict[int, set[records.Source]]:
        """What is left of the group of a role, as the definition of the code says it."""
        group = self.placement.by_role.get(role)
        if group is None:
            return {}
        found = {}
        for number, other in enumerate(group.roles):
            places = self.sources(other, generation, name)
            if other != role and (places or name not in self.layouts[other].shard_parts):
                found[number] = places
        for number, block in enumerate(group.blocks):
            intact = self.sources(block, generation, name)
            told = {place.node for place in self.sources(block, generation, INPUTS)}
            if places := {place for place in intact if place.node in told}:
                found[len(group.roles) + number] = places
        return found

    def producible(self, generation: records.Generation) -> bool:
        return all(
            self.sources(role, generation, EXTRAS)
            and all(
                self.sources(role, generation, name)
                or len(self.blocks(role, generation, name)) >= len(self.group_roles(role))
                for name in self.layouts[role].shard_parts
            )
            for role in self.seats
        )

    def group_roles(self, role: int) -> tuple[int, ...]:
        group = self.placement.by_role.get(role)
        return group.roles if group is not None else (role,)


def decoding(answer: records.Restore, role: int, part: str = "main") -> records.Decoding:
    assert not answer.sources[role][part]
    return answer.recipes[role].decodings[part]


def test_decoding_uses_the_group_with_the_most_blocks():
    world = World({role: role for role in range(4)}, 8, group=2, parities=2)
    other = world.place(4)
    world.protect(other, (NEW,))
    world.lost = {0}
    found = decoding(chosen(world.ask()), 0)
    assert (len(found.group), sorted(found.blocks)) == (4, [1, 2, 3, 4, 5])
    (group,) = other.groups
    world.bad = {records.BadPart(node, group.blocks[0], NEW, "main") for node in range(8)}
    world.bad |= {records.BadPart(node, group.blocks[1], NEW, "main") for node in range(8)}
    assert len(decoding(chosen(world.ask()), 0).group) == 2


@given(st.permutations([1, 2, 3]), st.integers(2, 4), st.integers(0, 3))
def test_blocks_of_codes_of_other_sizes_are_not_mixed(parities, size, lost):
    """The same roles in the same order, with more blocks or fewer, as plans before had them."""
    world = World({role: role for role in range(size)}, 8, group=size, parities=parities[0])
    for other in parities[1:]:
        world.protect(world.place(size, other), (NEW,))
    world.lost = {lost % size}
    found = decoding(chosen(world.ask()), lost % size)
    for number, places in found.blocks.items():
        block = number - size
        wanted = number if block < 0 else parity_role(found.group, found.parities, block)
        assert {place.role for place in places} == {wanted}
    assert len(found.blocks) == size - 1 + found.parities


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes = draw(st.integers(3, 7))
    training = draw(st.integers(2, nodes))
    per_node = draw(st.integers(1, 2))
    roles = {role: role // per_node for role in range(training * per_node)}
    group = draw(st.integers(2, 4))
    parts = {role: ("main", "expert") for role in roles if draw(st.booleans())}
    world = World(roles, nodes, group, draw(st.integers(1, 2)), parts)
    world.lost = draw(st.sets(st.integers(0, nodes - 1), max_size=3))
    places = [
        records.BadPart(node, role, generation, name)
        for node, held in sorted(world.held.items())
        for role, generation, name in sorted(held)
        if name != EXTRAS
    ]
    world.bad = set(draw(st.lists(st.sampled_from(places), max_size=6)))
    return world


@given(worlds())
def test_chosen_generation_is_the_newest_that_can_be_produced(world):
    answer = choose_restore(world.ask())
    found = [generation for generation in (NEW, OLD) if world.producible(generation)]
    if not found:
        assert isinstance(answer, NoRestore)
        return
    assert isinstance(answer, records.Restore)
    assert answer.generation == found[0]
    for role in world.seats:
        for name in world.layouts[role].shard_parts:
            places = world.sources(role, found[0], name)
            assert set(answer.sources[role][name]) == places
            recipe = answer.recipes.get(role)
            coded = recipe.decodings.get(name) if recipe is not None else None
            assert (coded is None) == bool(places)
            if coded is not None:
                assert coded.group == world.group_roles(role)
                got = {number: set(one) for number, one in coded.blocks.items()}
                assert got == world.blocks(role, found[0], name)


@pytest.mark.parametrize("parities", [1, 2])
def test_layouts_of_other_bytes_do_not_mix(parities):
    """The same parity role under another layout on another node: its bytes are not counted."""
    world = World({role: role for role in range(2)}, 5, group=2, parities=parities)
    world.lost = {0}
    query = world.ask()
    (group,) = world.placement.groups
    holder = group.holders[0]
    mine = query.inventories[holder]
    strange = tuple(
        replace(one, layout_hash="strange") if one.role == group.blocks[0] else one
        for one in mine.layouts
    )
    stranger = records.Inventory(
        -1, 1, (), tuple(x for x in mine.layouts if x.role == group.blocks[0])
    )
    inventories = {-1: stranger, **query.inventories, holder: replace(mine, layouts=strange)}
    answer = choose_restore(replace(query, inventories=inventories))
    if parities == 1:
        assert isinstance(answer, NoRestore)
    else:
        assert isinstance(answer, records.Restore)
        assert sorted(decoding(answer, 0).blocks) == [1, 3]
