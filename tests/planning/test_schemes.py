"""Memory and time of a node and other schemes than copies: by hand, and side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.layout.sizing import choose
from deadpool_megatron.planning.assess import Assessment, assess, facts, lost_steps
from deadpool_megatron.planning.compare import SCHEMES, compare
from deadpool_megatron.planning.keys import Plan, PlanError
from deadpool_megatron.planning.layouts import protection_plan, scene_of
from deadpool_megatron.planning.risk import holder_sets
from deadpool_megatron.planning.roles import place
from deadpool_megatron.planning.traffic import (
    NodeLoad,
    Timing,
    fetch_seconds,
    mean_share,
    node_loads,
    timing,
)
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.memory import node_needs
from tests.planning.plans import make

SHARD = 12 * 10**10 // 16  # 16 roles, two on each of 8 nodes
EXTRAS = 1000
ROOM = 5 * (128 << 10)
SLOTS = 2
# Of segments: headers, whole pages, who is in a parity group; of all roles.
AROUND = 4_000_000
AROUND_A_NODE = 500_000  # headers and whole pages
VALUES = {
    "racks": st.sampled_from([None, 2, 4, 8]),
    "node_order": st.sampled_from(["by-rack", "across-racks"]),
}


def worked_out(scheme: str, **more: int | str) -> Assessment:
    protection = {"scheme": scheme, "extras_bytes_per_role": EXTRAS, **more}
    return assess(make(protection=protection, cluster={"host_memory_gb": 5000}))


def total(found: Assessment, name: str) -> int:
    return sum(getattr(load, name) for load in found.loads.values())


@pytest.mark.parametrize(("group", "blocks"), [(2, 1), (4, 1), (4, 2)])
def test_parity(group: int, blocks: int) -> None:
    """Blocks in place of copies, on the wire as many bytes; a lost node takes k shards."""
    found = worked_out("parity", parity_group=group, replicas=blocks)
    groups = 16 // group
    assert len(found.placement.groups) == groups
    blocks_and_extras = SLOTS * blocks * (groups * SHARD + 16 * ROOM)
    assert total(found, "copies_bytes") == pytest.approx(blocks_and_extras, abs=AROUND)
    assert total(found, "out_bytes_per_step") == 16 * blocks * (SHARD + EXTRAS)
    assert total(found, "in_bytes_per_step") == total(found, "out_bytes_per_step")
    sizes = {len(nodes) for nodes in _sets(found)}
    assert sizes == {blocks + 1}
    copies = worked_out("buddy", replicas=blocks)
    assert found.fetch_seconds > copies.fetch_seconds
    assert found.risk.loss_probability[blocks - 1] == 0
    assert found.risk.loss_probability[blocks] > copies.risk.loss_probability[blocks]


@pytest.mark.parametrize("scheme", ["buddy", "parity", "local", "local-twice", "recompute"])
def test_a_node_of_the_run_asks_for_what_was_planned(scheme: str) -> None:
    plan = make(protection={"scheme": scheme}, cluster={"host_memory_gb": 5000, "spares": 0})
    found = assess(plan)
    layouts = scene_of(plan, found.placement).layouts
    needs = node_needs(layouts[0], 2, Settings(protection=scheme, parity_group=4))
    assert total(found, "own_slots_bytes") == 8 * needs.own
    # A member rounds the part of a block that falls to one role up.
    assert 0 <= 8 * needs.kept - total(found, "copies_bytes") <= 16


def _sets(found: Assessment) -> frozenset[frozenset[int]]:
    return holder_sets(found.placement)


def test_local_survives_no_node() -> None:
    found = worked_out("local")
    assert total(found, "copies_bytes") == total(found, "out_bytes_per_step") == 0
    assert found.risk.loss_probability[0] == pytest.approx(8 / 9)  # one of the nine is a spare
    assert len(found.risk.fatal_domains) == 8


def test_local_twice_takes_the_own_slots_once_more_and_another_checksum() -> None:
    found, once = worked_out("local-twice"), worked_out("local")
    assert total(found, "copies_bytes") == total(found, "own_slots_bytes")
    assert total(found, "out_bytes_per_step") == 0
    assert found.timing.checksum_seconds == 2 * once.timing.checksum_seconds
    assert found.risk == once.risk


def test_recompute_by_hand() -> None:
    """As many whole generations on the buddy as without steps, and beside them the steps, in eight
    slots more; gradients are a third of the state."""
    found = worked_out("recompute", full_every=8)
    gradients = SHARD // 3
    own = 16 * SLOTS * (SHARD + gradients + ROOM)
    assert total(found, "own_slots_bytes") == pytest.approx(own, abs=AROUND)
    chains = 16 * (SLOTS * (SHARD + ROOM) + (SLOTS + 8) * (gradients + ROOM))
    assert total(found, "copies_bytes") == pytest.approx(chains, abs=2 * AROUND + 16 * 12 * 65536)
    assert mean_share(found.plan) == pytest.approx((1 + 7 / 3) / 8)
    assert found.timing == worked_out("buddy").timing, "every eighth step a whole copy has to fit"


@pytest.mark.parametrize(
    ("cadence", "lag", "window", "lost"), [(1, 0, 18, 1), (3, 0, 58, 5), (3, 1, 118, 8)]
)
def test_cadence_lengthens_the_window_and_the_rpo(
    cadence: int, lag: int, window: int, lost: int
) -> None:
    """Steps of 20 s, nine tenths of them forward and backward."""
    found = worked_out("buddy", cadence=cadence, max_lag=lag)
    assert found.timing.window_seconds == pytest.approx(window)
    assert lost_steps(found.plan, found.placement.slots) == lost
    assert mean_share(found.plan) == 1 / cadence


@pytest.mark.parametrize("more", [{"cadence": 4}, {"scheme": "recompute", "full_every": 4}])
def test_what_is_said_to_be_sent_per_step_is_what_a_step_sends(more: dict[str, Any]) -> None:
    plan = make(protection=more, cluster={"host_memory_gb": 5000})
    found = assess(plan)
    whole = max(load.out_bytes_per_step for load in found.loads.values())
    nodes: Any = facts(found)["nodes"]
    assert nodes["out_bytes_per_step"]["largest"] == round(whole * mean_share(plan))
    assert nodes["unique_bytes"]["largest"] == max(x.unique_bytes for x in found.loads.values())


def test_a_cadence_makes_a_plan_hold_that_did_not() -> None:
    slow = {"nic_gb_s": 0.6, "host_memory_gb": 5000}
    with pytest.raises(PlanError, match="its window at lag 0"):
        assess(make(cluster=slow))
    assert assess(make(cluster=slow, protection={"cadence": 2})).timing.stall_seconds == 0


@pytest.mark.parametrize(
    ("protection", "cluster", "said"),
    [
        ({"scheme": "recompute", "cadence": 2}, {}, "protection.cadence"),
        ({"scheme": "parity", "replicas": 8}, {}, "parity that survives 8 lost nodes needs 10"),
        (
            {"scheme": "parity", "parity_group": 8},
            {"spares": 0},
            "protection.parity_group: groups of 8 and .* need 9 nodes, there are 8 .* set it to 7",
        ),
        ({"scheme": "parity", "parity_group": 256}, {}, "more than 256 blocks: set it to 255"),
        ({"scheme": "parity"}, {"host_memory_gb": 30}, "GB for parity blocks"),
        ({"scheme": "none"}, {}, "must be one of buddy, parity, local, local-twice, recompute"),
    ],
)
def test_refusals(protection: dict[str, object], cluster: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        assess(make(protection=protection, cluster=cluster))


def test_all_schemes_side_by_side() -> None:
    rows = compare(make(cluster={"host_memory_gb": 5000}))
    assert [row.scheme.split("(")[0] for row in rows] == list(SCHEMES)
    facts = {row.scheme.split("(")[0]: row.facts() for row in rows}
    assert all(known["ok"] for known in facts.values())
    memory = {name: known["memory_bytes"] for name, known in facts.items()}
    assert memory["local-twice"] == 2 * memory["local"]
    assert memory["local"] < memory["parity"] < memory["buddy"] < memory["recompute"]
    assert facts["local"]["sent_bytes_per_step"] == 0


def test_a_scheme_that_does_not_fit_says_why() -> None:
    rows = {row.scheme: row for row in compare(make(cluster={"host_memory_gb": 70}))}
    assert rows["recompute(8)"].found is None
    assert "cluster.host_memory_gb" in rows["recompute(8)"].refusal
    assert rows["recompute(8)"].facts()["ok"] is False
    assert rows["parity(4)"].found is not None


def test_recovery_of_a_decoded_shard_takes_longer() -> None:
    parity = make(protection={"scheme": "parity", "parity_group": 4})
    placement = place(parity)
    loads = node_loads(parity, placement)
    shards = max(load.unique_bytes for load in loads.values())
    assert fetch_seconds(parity, placement, loads) == pytest.approx(
        4 * shards / 10e9 + SHARD / 20e9
    )


@pytest.mark.parametrize("scheme", ["local", "local-twice"])
def test_what_no_other_node_holds_is_not_fetched(scheme: str) -> None:
    sections = {"protection": {"scheme": scheme}, "cluster": {"nic_gb_s": 0.1}}
    assert assess(make(**sections)).fetch_seconds == pytest.approx(SHARD / 20e9)


def test_ways_to_lose_a_group_are_counted_or_said_to_be_too_many() -> None:
    sections: dict[str, dict[str, Any]] = {
        "protection": {"scheme": "parity", "parity_group": 20, "replicas": 10},
        "cluster": {"nodes": 32, "host_memory_gb": 5000},
        "parallel": {"dp": 16},
    }
    with pytest.raises(PlanError, match=r"a group of 20 is lost in 54627300 ways, too many"):
        assess(make(**sections))
    sections["protection"] |= {"parity_group": 8, "replicas": 4}
    assert assess(make(**sections)).risk.holder_sets > 1000


def test_mixed_is_the_first_scheme_that_holds() -> None:
    def settled(memory_gb: float) -> str:
        plan = make(protection={"scheme": "mixed"}, cluster={"host_memory_gb": memory_gb})
        return assess(plan).plan.protection.name

    assert settled(5000) == "buddy"
    rows = {row.scheme: row for row in compare(make(cluster={"host_memory_gb": 5000}))}
    needed = float(str(rows["buddy"].facts()["memory_bytes"])) / 1e9
    assert settled(needed * 0.99).startswith("parity(")
    with pytest.raises(PlanError, match="GB for parity blocks"):
        settled(30)


@pytest.mark.parametrize("memory_gb", range(40, 280, 12))
def test_mixed_is_what_a_run_chooses(memory_gb: int) -> None:
    """One spare in a domain of its own holds all copies: it could not take a node's roles, too."""
    cluster = {"host_memory_gb": memory_gb, "domains_file": "x", "checksum_gb_s": 100}
    sections = {"protection": {"scheme": "mixed"}, "cluster": {**cluster, "nic_gb_s": 1000}}
    text = "".join(f"{node} rack{node // 8}\n" for node in range(9))
    found = assess(dataclasses.replace(make(**sections), domains_text=text))
    scene = scene_of(found.plan, found.placement)
    chosen = choose(scene, dict.fromkeys(scene.domains, memory_gb * 10**9))
    assert protection_plan(found.plan) == chosen.plan


def loads_of(plan: Plan) -> dict[int, NodeLoad]:
    return node_loads(plan, place(plan))


def test_a_node_by_hand() -> None:
    plan = make(protection={"extras_bytes_per_role": EXTRAS})
    loads = loads_of(plan)
    for node in range(8):
        load, slots = loads[node], pytest.approx(2 * 2 * (SHARD + ROOM), abs=AROUND_A_NODE)
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
            assert load.copies_bytes == pytest.approx(2 * 3 * ROOM, abs=AROUND_A_NODE)
            own = 2 * 3 * (4 * SHARD + ROOM)
            assert load.own_slots_bytes == pytest.approx(own, abs=AROUND_A_NODE)


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
