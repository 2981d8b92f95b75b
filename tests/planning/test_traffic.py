"""Memory and time of a node: by hand for a small plan, and what can only grow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.planning.assess import assess
from deadpool_megatron.planning.keys import Plan
from deadpool_megatron.planning.roles import place
from deadpool_megatron.planning.traffic import NodeLoad, Timing, node_loads, timing
from tests.planning.plans import make

SHARD = 12 * 10**10 // 16
EXTRAS = 1000
ROOM = 5 * (128 << 10)
AROUND = 500_000  # headers and whole pages


def loads_of(plan: Plan) -> dict[int, NodeLoad]:
    return node_loads(plan, place(plan))


def test_a_node_by_hand() -> None:
    plan = make(protection={"extras_bytes_per_role": EXTRAS})
    loads = loads_of(plan)
    for node in range(8):
        load, slots = loads[node], pytest.approx(2 * 2 * (SHARD + ROOM), abs=AROUND)
        assert load.unique_bytes == 2 * (SHARD + EXTRAS)
        assert load.own_slots_bytes == load.copies_bytes == slots
        assert load.out_bytes_per_step == load.in_bytes_per_step == 2 * (SHARD + EXTRAS)
    assert loads[8] == NodeLoad(0, 0, 0, 0, 0)
    times = timing(plan, place(plan), loads, 20)
    assert times.copy_seconds == SHARD / 20e9
    assert times.checksum_seconds == SHARD / 5e9
    assert times.ship_seconds == 2 * (SHARD + EXTRAS) / 10e9
    assert times.window_seconds == 18
    assert times.hidden_fraction == 1


def test_copies_keep_their_pace_and_hurry_only_for_a_gate() -> None:
    def times(share: float, **cluster: float) -> Timing:
        plan = make(protection={"link_share": share}, cluster=cluster)
        return timing(plan, place(plan), loads_of(plan), 20)

    fast, slow, full = times(0.3, nic_gb_s=10), times(0.01, nic_gb_s=10), times(1.0, nic_gb_s=10)
    assert fast.paced_ship_seconds == pytest.approx(fast.ship_seconds / 0.3)
    assert full.paced_ship_seconds == full.ship_seconds
    rest = slow.window_seconds - slow.copy_seconds - slow.checksum_seconds
    assert slow.paced_ship_seconds == 0.7 * rest
    assert fast.stall_seconds == slow.stall_seconds == 0
    assert fast.least_commit_seconds < fast.commit_seconds < slow.commit_seconds
    late = times(0.3, nic_gb_s=0.9)
    assert late.paced_ship_seconds == late.ship_seconds
    assert late.stall_seconds == late.least_commit_seconds - late.window_seconds > 0


def test_what_peers_hold_anyway_is_not_shipped() -> None:
    plan = make(
        parallel={"distributed_optimizer": False},
        protection={"extras_bytes_per_role": EXTRAS},
        cluster={"host_memory_gb": 5000},
    )
    for node, load in loads_of(plan).items():
        if node < 8:
            assert load.out_bytes_per_step == 2 * EXTRAS
            assert load.copies_bytes == pytest.approx(2 * 3 * ROOM, abs=AROUND)
            own = 2 * 3 * (4 * SHARD + ROOM)
            assert load.own_slots_bytes == pytest.approx(own, abs=AROUND)


VALUES = {
    "racks": st.sampled_from([None, 2, 4, 8]),
    "node_order": st.sampled_from(["by-rack", "across-racks"]),
}


@given(cluster=st.fixed_dictionaries(VALUES), lag=st.integers(0, 4), replicas=st.integers(1, 3))
def test_memory_grows_with_lag_and_copies(cluster: dict[str, Any], lag: int, replicas: int) -> None:
    def total(lag: int, replicas: int) -> tuple[int, int]:
        protection = {"max_lag": lag, "replicas": replicas}
        loads = loads_of(make(cluster=cluster, protection=protection)).values()
        return sum(load.memory_bytes for load in loads), max(load.memory_bytes for load in loads)

    here = total(lag, replicas)
    assert all(a < b for a, b in zip(here, total(lag + 1, replicas), strict=True))
    assert here[0] < total(lag, replicas + 1)[0]


@given(cluster=st.fixed_dictionaries(VALUES), replicas=st.integers(1, 3))
def test_what_is_sent_arrives(cluster: dict[str, Any], replicas: int) -> None:
    loads = loads_of(make(cluster=cluster, protection={"replicas": replicas})).values()
    sent = sum(load.out_bytes_per_step for load in loads)
    assert sent == sum(load.in_bytes_per_step for load in loads)
    assert sent == replicas * sum(load.unique_bytes for load in loads)


def test_more_lag_means_a_longer_window_but_no_faster_links() -> None:
    slow = make(cluster={"nic_gb_s": 0.5}, protection={"max_lag": 8})
    times = timing(slow, place(slow), loads_of(slow), 20)
    assert times.commit_seconds < times.window_seconds
    assert times.ship_seconds > times.step_seconds
    assert times.stall_seconds == times.ship_seconds - 20
    assert 0 < times.hidden_fraction < 1


def test_spares_and_exposure_are_part_of_the_risk() -> None:
    none, one = (assess(make(cluster={"spares": spares})).risk for spares in (0, 1))
    assert none.exposure_seconds > 300 > one.exposure_seconds > 30
    assert none.hours_between_state_losses < one.hours_between_state_losses
    given_seconds = assess(make(faults={"exposure_seconds": 500})).risk.exposure_seconds
    assert given_seconds > 500
    assert one.hours_between_node_losses == pytest.approx(1000 / 8)


def test_hot_swap_beats_a_restart_that_costs_more() -> None:
    goodput = assess(make()).goodput
    assert goodput.restart < goodput.hot_swap < goodput.available < 1
