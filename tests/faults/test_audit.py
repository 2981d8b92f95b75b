"""Numbers that are silently wrong in one role: its node is named, and no state has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory.bad_nodes import read_bad_nodes
from tests.faults.harness.jobs import Layout, fault, run_job, strike
from tests.faults.harness.layouts import FOUR_SHARDS, PIPELINE, PP2_DP2, VIRTUAL

pytestmark = [pytest.mark.slow, pytest.mark.full]
ITERATIONS = 12
SETTINGS = "--deadpool-audit-interval 1"


def test_flipped_bits_name_their_nodes_and_leave_no_trace(tmp_path: Path) -> None:
    """A weight, a shard of the optimizer's state, a gradient, what a forward pass gives: each time
    of a node that has a spare.

    The audited role is another one in each iteration: of four peers it is 2 in iteration 6, and 3
    in iteration 7.
    """
    plan = [
        fault("weight", "audit.weight", when_role=1, when_iteration=4, action="mark"),
        fault("shard", "audit.state", when_role=2, when_iteration=6, action="mark"),
        fault("gradient", "audit.gradient", when_role=3, when_iteration=7, action="mark"),
        fault("pass", "audit.pass", when_role=0, when_iteration=10, action="mark"),
    ]
    run = tmp_path / "run"
    outcome = strike(run, FOUR_SHARDS, ITERATIONS, plan, spares=4, settings=SETTINGS)
    found = [
        (e.iteration, e.data["roles"], e.data["certain"]) for e in outcome.of_kind("audit-failed")
    ]
    assert found == [(4, [1], True), (6, [2], True), (7, [3], True), (10, [0], True)]
    recoveries = outcome.final["recoveries"]
    assert [r["kind"] for r in recoveries] == ["silent-corruption"] * 4
    assert [r["generation"][1] for r in recoveries] == [3, 5, 6, 9], "nothing wrong was kept"
    assert [e.node for e in outcome.of_kind("node-aside")] == [1, 2, 3, 0]
    assert {bad.kind for bad in read_bad_nodes(run.parent)} == {"silent-corruption"}
    assert {e.iteration for e in outcome.of_kind("audited")} == set(range(1, ITERATIONS + 1))


def test_of_two_peers_that_are_both_sure_nobody_knows_who_is_wrong(tmp_path: Path) -> None:
    """The state before is saved, and the run ends rather than train on."""
    where = {"when_role": 1, "when_iteration": 4, "action": "mark"}
    plan = [fault(name, "audit.pass", **where) for name in ("pass", "pass-once-more")]
    outcome = run_job(tmp_path / "run", PP2_DP2, ITERATIONS, plan, settings=SETTINGS)
    assert outcome.status == 3, outcome.story()
    assert "node 0 and node 1" in outcome.final["reason"]


def test_of_two_peers_the_one_that_does_not_repeat_itself_is_wrong(tmp_path: Path) -> None:
    """A single flip in a pass, and one in an update that is computed again."""
    plan = [
        fault("pass", "audit.pass", when_role=1, when_iteration=4, action="mark"),
        fault("update", "audit.update", when_role=3, when_iteration=7, action="mark"),
    ]
    outcome = strike(tmp_path / "run", PP2_DP2, ITERATIONS, plan, spares=2, settings=SETTINGS)
    found = [
        (e.iteration, e.data["roles"], e.data["certain"]) for e in outcome.of_kind("audit-failed")
    ]
    assert found == [(4, [1], True), (7, [3], True)]
    assert [e.node for e in outcome.of_kind("node-aside")] == [1, 3]


@pytest.mark.parametrize(
    ("pipeline", "role"), [(PIPELINE, 1), (VIRTUAL.flags, 4)], ids=["plain", "interleaved"]
)
def test_the_stage_that_computed_a_pass_wrong_is_named_not_its_replica(
    pipeline: str, role: int, tmp_path: Path
) -> None:
    """Of three replicas of two stages: what one stage of the second gives on is wrong, and with it
    what its later stage makes of it, in an interleaved pipeline even the first stage."""
    layout = Layout("pp2-dp3", pipeline, nodes=6, members_per_node=1)
    plan = [fault("pass", "audit.pass", when_role=role, when_iteration=4, action="mark")]
    flags = "--global-batch-size 12"
    outcome = strike(
        tmp_path / "run", layout, ITERATIONS, plan, spares=1, flags=flags, settings=SETTINGS
    )
    (found,) = outcome.of_kind("audit-failed")
    assert (found.data["roles"], found.data["certain"]) == ([role], True)
