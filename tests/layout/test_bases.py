"""Who keeps whose weights: every owner with a buddy node finds one peer there, if there is room."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.layout.bases import (
    Masters,
    is_local_part,
    kept_for,
    local_parts,
    pack_masters,
    unpack_masters,
)
from deadpool_megatron.layout.demand import demand
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import EpochRecord, Generation, NodeAddress, Restore, Seat
from deadpool_megatron.layout.schemes import uniform
from deadpool_megatron.settings import Settings
from tests.layout.test_choice import SLOTS, scene


def record(seats: dict[int, int], replicas: int, spares: int) -> EpochRecord:
    nodes = {*seats.values(), *range(100, 100 + spares)}
    return EpochRecord(
        epoch=1,
        seats={role: Seat(node, role, 0) for role, node in seats.items()},
        nodes={node: NodeAddress("", 1, f"rack{node}", node >= 100) for node in nodes},
        restore=Restore("initial", Generation(1, 0)),
        replicas=replicas,
    )


def test_two_peers_on_two_nodes_keep_each_others() -> None:
    assert kept_for(record({0: 0, 1: 1}, 1, 0), (0, 1), 1) == {0: (1,), 1: (0,)}


def test_peers_of_one_node_share_the_work() -> None:
    seats = {role: role // 2 for role in range(8)}
    kept = kept_for(record(seats, 1, 0), range(8), 1)
    assert sorted(owner for owners in kept.values() for owner in owners) == list(range(8))
    assert all(seats[owner] != seats[keeper] for keeper, (owner,) in kept.items())


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 4), min_size=1),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_what_is_kept_is_kept_once_on_a_buddy_node(
    seats: dict[int, int], replicas: int, spares: int, count: int
) -> None:
    found = record(seats, replicas, spares)
    placement, peers = CopyPlacement.of_record(found), tuple(sorted(seats))
    kept = kept_for(found, peers, count)
    assert kept.keys() == seats.keys()
    at = [(owner, seats[keeper]) for keeper, owners in kept.items() for owner in owners]
    assert len(at) == len(set(at))
    assert all(node in placement.buddies(owner, peers) for owner, node in at)
    for keeper, owners in kept.items():
        assert len(owners) <= count
        if len(owners) < count:  # so that nobody else on this node is full either
            node = seats[keeper]
            wanted = {owner for owner in peers if node in placement.buddies(owner, peers)}
            assert wanted == {owner for owner, there in at if there == node}


def test_their_parts_are_no_shards_and_stay_on_the_node() -> None:
    names = [part.name for part in local_parts(3, 2, 100, 50)]
    assert names == ["model@0", "model@1", "model@masters"]
    assert all(map(is_local_part, names))
    assert not any(map(is_local_part, ("shard0", "extras@step", "step@update")))


def test_the_choice_of_a_plan_counts_them_as_own_memory_only() -> None:
    plain = scene(nodes=2, per_node=1)
    layouts = {
        role: replace(layout, parts=(*layout.parts, *local_parts(role, 1, 1000, 50)))
        for role, layout in plain.layouts.items()
    }
    plan = uniform("buddy", Settings(), 1, 0)
    before, after = demand(plan, plain), demand(plan, replace(plain, layouts=layouts))
    assert after.out == before.out
    for node, size in before.memory.items():  # in whole pages
        assert SLOTS * 1050 <= after.memory[node] - size <= (SLOTS * 2 + 1) * 4096


def test_masters_survive_their_part() -> None:
    masters = {"shard0": Masters(((0, 3, 6), (64, 2, 0)))}
    assert unpack_masters(memoryview(pack_masters(masters))) == masters
    assert masters["shard0"].base_bytes == 12
    assert list(masters["shard0"].gaps(80)) == [(12, 64), (72, 80)]
