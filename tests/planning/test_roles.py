"""Roles sit where the coordinator seats them and are grouped as Megatron groups them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from deadpool_megatron.layout.places.copies import CopyPlacement
from deadpool_megatron.planning.keys import Plan
from deadpool_megatron.planning.roles import (
    Placement,
    data_parallel_peers,
    expert_data_parallel_peers,
    place,
)
from tests.planning.plans import make

ORDER = "tp-cp-ep-dp-pp"


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(2, 1, 4, 2), (2, 2, 2, 3), (1, 1, 8, 2)])
@pytest.mark.parametrize(("etp", "ep"), [(None, 1), (1, 4), (None, 2)])
def test_groups_are_megatrons(tp: int, cp: int, dp: int, pp: int, etp: int | None, ep: int) -> None:
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp}
    parallel = make(
        parallel=sizes, cluster={"nodes": tp * cp * dp * pp, "gpus_per_node": 1}
    ).parallel
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    for group in dense.get_ranks("dp-cp"):
        assert all(data_parallel_peers(rank, parallel) == tuple(group) for rank in group)
    experts = RankGenerator(
        tp=etp or tp, ep=ep, dp=tp * cp * dp // (etp or tp) // ep, pp=pp, cp=1, order=ORDER
    )
    for group in experts.get_ranks("dp"):
        assert all(expert_data_parallel_peers(rank, parallel) == tuple(group) for rank in group)


def buddies_from_all_seats(plan: Plan, placement: Placement) -> list[tuple[int, ...]]:
    seats = {role.role: role.node for role in placement.roles}
    spares = range(plan.cluster.nodes, placement.nodes)
    copies = CopyPlacement(seats, placement.domains, spares, plan.protection.replicas)
    return [copies.buddies(role, data_parallel_peers(role, plan.parallel)) for role in seats]


@settings(max_examples=40)
@given(
    replicas=st.integers(1, 4),
    racks=st.sampled_from([None, 1, 3, 8]),
    order=st.sampled_from(["by-rack", "across-racks"]),
    spares=st.integers(0, 3),
    tp=st.sampled_from([1, 2, 4]),
)
def test_buddies_are_those_of_the_real_placement(
    replicas: int, racks: int | None, order: str, spares: int, tp: int
) -> None:
    plan = make(
        parallel={"tp": tp, "pp": 2, "dp": 8 // tp},
        protection={"replicas": replicas},
        cluster={"racks": racks, "node_order": order, "spares": spares},
    )
    placement = place(plan)
    assert [role.buddies for role in placement.roles] == buddies_from_all_seats(plan, placement)
    domains = len(set(placement.domains.values()))
    if domains > replicas:
        assert placement.same_domain == 0
    for role in placement.roles:
        assert role.node not in role.buddies


def parts_of(plan: Plan, role: int) -> list[tuple[int, tuple[int, ...], bool]]:
    return [(part.nbytes, part.replicas, part.covered) for part in place(plan).roles[role].parts]


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, (12 * 10**10 // 4 // 4, (1,), False)),
        ({"optimizer_instances": 2}, (12 * 10**10 // 4 // 2, (1, 5), True)),
        ({"distributed_optimizer": False}, (12 * 10**10 // 4, (1, 3, 5, 7), True)),
    ],
)
def test_shards_and_who_has_equal_bytes(
    parallel: dict[str, Any], expected: tuple[int, tuple[int, ...], bool]
) -> None:
    assert parts_of(make(parallel=parallel), 1) == [expected]


def test_experts_are_a_part_of_their_own() -> None:
    plan = make(model={"expert_parameters": 8 * 10**9}, parallel={"ep": 4})
    dense, expert = parts_of(plan, 0)
    assert dense == (12 * 2 * 10**9 // 4 // 4, (0,), False)
    # Two tensor ranks, two stages, four expert ranks: nobody else has these experts.
    assert expert == (12 * 8 * 10**9 // 16, (0,), False)


def test_slots() -> None:
    assert place(make()).slots == 2
    assert place(make(protection={"max_lag": 3})).slots == 5
    assert place(make(parallel={"optimizer_instances": 2})).slots == 3
    assert place(make(parallel={"distributed_optimizer": False})).slots == 3


def test_racks() -> None:
    rows = {"racks": 4, "spares": 2}
    domains = place(make(cluster=rows)).domains
    assert [domains[node] for node in (0, 1, 2, 7, 8, 9)] == [
        "rack0", "rack0", "rack1", "rack3", "rack0", "rack1"
    ]  # fmt: skip
    across = place(make(cluster={**rows, "node_order": "across-racks"})).domains
    assert [across[node] for node in (0, 1, 4, 7)] == ["rack0", "rack1", "rack0", "rack3"]
