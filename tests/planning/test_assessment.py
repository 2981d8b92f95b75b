"""Memory, traffic and time of a node by hand, under each scheme."""

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.layout.memory_needs import node_needs
from deadpool_megatron.planning import traffic
from deadpool_megatron.planning.assessment import Assessment, assess
from deadpool_megatron.planning.sections import Plan
from deadpool_megatron.settings import Settings
from tests.planning.plans import make

SHARD = 12 * 10**10 // 16  # 16 roles, two on each of 8 nodes
EXTRAS = 1000
CAPACITY = 5 * (128 << 10)
SLOTS = 2
# Of segments: headers, whole pages, who is in a parity group; of all roles, and of a node.
AROUND = 4_000_000
AROUND_A_NODE = 500_000


def worked_out(scheme: str, **more: int | str) -> Assessment:
    protection = {"scheme": scheme, "extras_bytes_per_role": EXTRAS, **more}
    return assess(make(protection=protection, cluster={"host_memory_gb": 5000}))


def total(found: Assessment, name: str) -> int:
    return sum(getattr(load, name) for load in found.loads.values())


def loads_of(plan: Plan) -> dict[int, traffic.NodeLoad]:
    return traffic.node_loads(plan, traffic.place(plan))


@pytest.mark.parametrize(("group", "blocks"), [(2, 1), (4, 1), (4, 2)])
def test_parity(group, blocks):
    """Blocks in place of copies, on the wire as many bytes."""
    found = worked_out("parity", parity_group=group, copies=blocks)
    groups = 16 // group
    assert len(found.placement.groups) == groups
    blocks_and_extras = SLOTS * blocks * (groups * SHARD + 16 * CAPACITY)
    assert total(found, "copies_bytes") == pytest.approx(blocks_and_extras, abs=AROUND)
    assert total(found, "out_bytes_per_step") == 16 * blocks * (SHARD + EXTRAS)
    assert total(found, "in_bytes_per_step") == total(found, "out_bytes_per_step")


@pytest.mark.parametrize("scheme", ["buddy", "parity", "local", "local-twice"])
def test_nodes_need_the_planned_memory(scheme):
    found = assess(
        make(protection={"scheme": scheme}, cluster={"host_memory_gb": 5000, "spares": 0})
    )
    layouts = found.placement.topology.layouts
    needs = node_needs(layouts[0], 2, Settings(protection=scheme, parity_group=4))
    assert total(found, "own_slots_bytes") == 8 * needs.own
    # A member rounds the part of a block that falls to one role up.
    assert 0 <= 8 * needs.kept - total(found, "copies_bytes") <= 16


def test_a_node_by_hand():
    plan = make(protection={"extras_bytes_per_role": EXTRAS})
    loads = loads_of(plan)
    for node in range(8):
        load, slots = loads[node], pytest.approx(2 * 2 * (SHARD + CAPACITY), abs=AROUND_A_NODE)
        assert load.unique_bytes == 2 * (SHARD + EXTRAS)
        assert load.own_slots_bytes == load.copies_bytes == slots
        assert load.out_bytes_per_step == load.in_bytes_per_step == 2 * (SHARD + EXTRAS)
    assert loads[8] == traffic.NodeLoad(0, 0, 0, 0, 0)
    times = traffic.timing(plan, traffic.place(plan), loads, 20)
    assert times.copy_seconds == SHARD / 20e9
    assert times.checksum_seconds == SHARD / 5e9
    assert times.ship_seconds == 2 * (SHARD + EXTRAS) / 10e9
    assert times.window_seconds == 18


@given(racks=st.sampled_from([None, 2, 4, 8]), lag=st.integers(0, 4), replicas=st.integers(1, 3))
def test_loads_balance_and_memory_grows_with_lag_and_copies(racks, lag, replicas):
    def loads(lag: int, replicas: int) -> list[traffic.NodeLoad]:
        protection = {"max_lag": lag, "copies": replicas}
        cluster = {"racks": racks}
        return list(loads_of(make(cluster=cluster, protection=protection)).values())

    def memory(lag: int, replicas: int) -> int:
        return sum(load.memory_bytes for load in loads(lag, replicas))

    here = loads(lag, replicas)
    sent = sum(load.out_bytes_per_step for load in here)
    assert sent == sum(load.in_bytes_per_step for load in here)
    assert sent == replicas * sum(load.unique_bytes for load in here)
    assert memory(lag, replicas) < min(memory(lag + 1, replicas), memory(lag, replicas + 1))
