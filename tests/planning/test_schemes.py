"""Other schemes than copies, and other cadences: by hand, and side by side."""

from __future__ import annotations

import dataclasses

import pytest

from deadpool_megatron.layout.reckoning.choice import choose
from deadpool_megatron.planning.assess import Assessment, assess, lost_steps
from deadpool_megatron.planning.compare import SCHEMES, compare
from deadpool_megatron.planning.keys import PlanError
from deadpool_megatron.planning.layouts import protection_plan, scene_of
from deadpool_megatron.planning.risk import holder_sets
from deadpool_megatron.planning.roles import place
from deadpool_megatron.planning.traffic import fetch_seconds, mean_share, node_loads
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.memory.needs import node_needs
from tests.planning.plans import make

SHARD = 12 * 10**10 // 16  # 16 roles, two on each of 8 nodes
EXTRAS = 1000
ROOM = 5 * (128 << 10)
SLOTS = 2
# Of segments: headers, whole pages, who is in a parity group; of all roles.
AROUND = 4_000_000


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
