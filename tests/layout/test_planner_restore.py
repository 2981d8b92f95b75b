"""Choosing seats and the restore: who plays which role, what every role can produce, from where."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.layout import planner, records
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.records import Generation, PartInfo, Restore, RoleLayout, Seat
from tests.layout.held import Content, chosen, holders, inventories

ALL = frozenset({"main", "extras@step", "extras@evaluation", "extras@save"})
STEP = frozenset({"main", "extras@step"})
PARTS = ["main", "extras@step", "extras@evaluation"]


def g(iteration: int, lineage: int = 1) -> Generation:
    return Generation(lineage, iteration)


def layout(role: int, replicas: tuple[int, ...] = (), layout_hash: str = "") -> RoleLayout:
    parts = (
        PartInfo("main", 8, replicas or (role,)),
        *(PartInfo(f"extras@{b}", 8, (role,)) for b in ("step", "evaluation", "save")),
    )
    return RoleLayout(role, parts, (0, 1), 3, layout_hash or f"hash{role}")


def ask(
    content: Content,
    *,
    roles: int = 2,
    replicas: tuple[int, ...] = (),
    seats: Mapping[int, Seat] | None = None,
    **more: object,
) -> planner.RestoreQuery:
    """A query about nodes whose vaults hold ``content``; roles sit on the node of their number."""
    held = inventories(content, lambda role: layout(role, replicas))
    owners = {role: Seat(role, 0, 0) for role in range(roles)}
    facts: dict[str, object] = {"kept": {1: NO_LIMIT}, **more}
    return planner.RestoreQuery(
        2, range(roles), held, owners if seats is None else seats, owners, **facts
    )  # type: ignore[arg-type]


def test_replica_gives_the_shard_but_never_the_extras():
    content = {1: [(1, g(7), STEP), (0, g(7), frozenset({"extras@step"}))]}
    layouts = {0: layout(0, (0, 1))}
    answer = chosen(ask(content, replicas=(0, 1), layouts=layouts))
    assert answer.sources[0] == {
        "main": (records.Source(1, 1),),
        "extras@step": (records.Source(1, 0),),
    }
    content = {1: [(1, g(7), STEP), (0, g(7), frozenset({"main"}))]}
    assert isinstance(
        planner.choose_restore(ask(content, replicas=(0, 1), layouts=layouts)), planner.NoRestore
    )


def test_abandoned_lineages_are_never_chosen():
    content = {
        0: [(0, g(7), STEP), (0, g(8), STEP), (0, g(9, 2), STEP)],
        1: [(1, g(7), STEP), (1, g(8), STEP), (1, g(9, 2), STEP)],
    }
    assert chosen(ask(content, kept={1: 7, 3: NO_LIMIT})).generation == g(7)
    assert chosen(ask(content, kept={1: 8, 2: NO_LIMIT})).generation == g(9, 2)


def test_bytes_of_another_layout_are_not_used():
    content = {0: [(0, g(7), STEP)], 1: [(1, g(7), STEP)]}
    other = {1: layout(1, layout_hash="other")}
    assert isinstance(planner.choose_restore(ask(content, layouts=other)), planner.NoRestore)


@given(
    own=st.integers(2, 4),
    others=st.integers(1, 3),
    hashes=st.permutations(["a", "b"]),
    newer=st.booleans(),
)
def test_slots_of_another_model_do_not_outvote_the_majority(own, others, hashes, newer):
    """Left by a run before: whatever they hold, and by whatever name their layout goes."""
    others = min(others, own - 1)
    mine, strange = ({role: layout(role, layout_hash=one) for role in range(2)} for one in hashes)

    def inventory(
        node: int, generation: Generation, layouts: Mapping[int, RoleLayout]
    ) -> records.Inventory:
        holdings = tuple(records.Holding(role, generation, STEP) for role in layouts)
        return records.Inventory(node, 1, holdings, tuple(layouts.values()))

    query = ask({})
    alone = {node: inventory(node, g(7), mine) for node in range(own)}
    beside = {
        node: inventory(node, g(8 if newer else 7), strange) for node in range(own, own + others)
    }
    answer = chosen(replace(query, inventories=alone | beside))
    assert answer.generation == g(7)
    assert answer.sources == chosen(replace(query, inventories=alone)).sources


def test_after_memory_comes_the_checkpoint_then_the_start_then_nothing():
    content = {0: [(0, g(7), STEP)]}
    durable = Restore("durable", g(5), "save", path="/ck/5")
    start = Restore("initial", g(0))
    answer = chosen(ask(content, durable=durable, start=start))
    assert (answer.kind, answer.generation, answer.path) == ("durable", g(5, 2), "/ck/5")
    assert (answer.boundary, answer.sources) == ("save", {})
    assert chosen(ask(content, start=start)) == Restore("initial", g(0, 2))
    nothing = planner.choose_restore(ask(content))
    assert isinstance(nothing, planner.NoRestore)
    assert "layout of role 1" in nothing.reason


@pytest.mark.parametrize(
    ("lineage", "iteration", "nonfinite", "is_away"),
    [
        (2, 12, {10: 2}, True),  # in memory nothing of lineage 2 may have been kept
        (1, 10, {10: 2}, True),  # told late: lineage 2 went on from it
        (3, 12, {10: 2}, False),  # computed anew
        (2, 6, {5: 1}, False),  # saved by the one before, and gone on from when that was lost
    ],
)
def test_checkpoint_with_an_undone_update_is_rolled_back(lineage, iteration, nonfinite, is_away):
    assert planner.is_rolled_back(g(iteration, lineage), nonfinite) is is_away


@st.composite
def contents(
    draw: st.DrawFn,
) -> tuple[int, dict[int, list[tuple[int, Generation, frozenset[str]]]]]:
    roles = draw(st.integers(1, 3))
    generations = [g(6), g(7), g(7, 2)]
    return roles, {
        node: [
            (role, generation, draw(st.frozensets(st.sampled_from(PARTS))))
            for role in range(roles)
            for generation in generations
            if draw(st.booleans())
        ]
        for node in range(draw(st.integers(1, 3)))
    }


@given(contents())
def test_chosen_generation_is_the_newest_that_can_be_produced(case) -> None:  # type: ignore[no-untyped-def]
    roles, content = case
    answer = planner.choose_restore(ask(content, roles=roles, kept={1: 7, 2: NO_LIMIT}))

    def producible(generation: Generation) -> bool:
        return all(holders(content, role, generation, "main") for role in range(roles)) and any(
            all(holders(content, role, generation, f"extras@{b}") for role in range(roles))
            for b in ("step", "evaluation")
        )

    candidates = [gen for gen in (g(6), g(7), g(7, 2)) if producible(gen)]
    if not candidates:
        assert isinstance(answer, planner.NoRestore)
        return
    assert isinstance(answer, Restore)
    assert (answer.kind, answer.generation) == ("memory", max(candidates))
    for role in range(roles):
        assert set(answer.sources[role]) == {"main", f"extras@{answer.boundary}"}
        for part, found in answer.sources[role].items():
            assert set(found) == holders(content, role, answer.generation, part)


def seats_of(*nodes: int, per_node: int = 2) -> dict[int, Seat]:
    return {
        i * per_node + slot: Seat(node, slot, 0)
        for i, node in enumerate(nodes)
        for slot in range(per_node)
    }


def members_of(*nodes: int, per_node: int = 2) -> dict[tuple[int, int], int]:
    return {(node, slot): 0 for node in nodes for slot in range(per_node)}


def test_spare_that_lacks_a_slot_does_not_fit():
    members = {**members_of(0), (2, 0): 0, **members_of(3)}
    assert planner.assign_seats(seats_of(0, 1), members).seats[2].node == 3


@given(
    training=st.integers(1, 5),
    spares=st.integers(0, 3),
    per_node=st.integers(1, 3),
    dead=st.sets(st.integers(0, 7)),
    leaving=st.frozensets(st.integers(0, 7)),
)
def test_survivors_stay_and_no_member_has_two_roles(training, spares, per_node, dead, leaving):
    old = seats_of(*range(training), per_node=per_node)
    live = [node for node in range(training + spares) if node not in dead]
    answer = planner.assign_seats(old, members_of(*live, per_node=per_node), leaving=leaving)
    assert set(answer.seats) | set(answer.unseated) == set(old)
    assert not set(answer.seats) & set(answer.unseated)
    assert len(set(answer.seats.values())) == len(answer.seats)
    for role, seat in answer.seats.items():
        assert seat.node in live
        assert seat.node not in leaving
        if old[role].node in live and old[role].node not in leaving:
            assert seat == old[role]
    idle = [n for n in live if n not in {s.node for s in answer.seats.values()} | leaving]
    idle = [n for n in idle if n >= training]
    assert not (answer.unseated and idle)
