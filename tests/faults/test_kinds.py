"""Failures in the embedded trainer by kind: numbers spoiled or wrong, slow nodes, hangs."""

import json
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory.bad_nodes import read_bad_nodes
from deadpool_megatron.cluster.watch.windows import SLOW_FACTOR
from deadpool_megatron.failures import GRACE_SECONDS
from deadpool_megatron.settings import Settings
from fake_nccl import KIND
from tests.cluster.runs import deadpool
from tests.faults.harness import jobs, layouts

pytestmark = [pytest.mark.slow, pytest.mark.full]
# As in other tests of this layout, so that they share one undisturbed run.
ITERATIONS = 12
LOST = jobs.fault("nan", "loss", when_iteration=9, action="mark")
# Gradients of one role, summed over its peers: the norm shows them, the loss does not yet.
WHERE = {"when_iteration": 5, "when_role": 1}
SPOILED = jobs.fault("nan", "optimizer.before", when_iteration=9, when_role=3, action="mark")
UNTIED = "--untie-embeddings-and-output-weights"
SAVES = "--save {run}/saves --save-interval"
HANGING_TRAINER = str(Path(__file__).parent / "harness" / "hanging_trainer.py")
GPU_TRAINER = str(Path(__file__).parent / "harness" / "gpu_trainer.py")
SLOW_TRAINER = str(Path(__file__).parent / "harness" / "slow_trainer.py")
AUDITED = "--deadpool-audit-interval 1"


@pytest.mark.parametrize(
    ("layout", "flags", "saving", "plan"),
    [
        (layouts.PP2_DP2, "", "", LOST),
        (layouts.PP2_DP2, "", "", SPOILED),
        (layouts.PP2_DP2, UNTIED, "", SPOILED),
        (layouts.PP2_DP2, "", f"{SAVES} 3", SPOILED),  # the iteration itself is saved
        (layouts.PP2_DP2, "", f"{SAVES} 4", SPOILED),
        # Here the role that reports the step has no part in the norm.
        (layouts.PLAIN_OPTIMIZER, "", "", SPOILED),
        (layouts.INSTANCES, "", "", SPOILED),
        (layouts.EXPERTS, "", "", SPOILED),
    ],
    ids=["loss", "tied", "untied", "saves-3", "saves-4", "plain", "instances", "experts"],
)
def test_a_number_that_is_nan_once_is_rolled_back_and_leaves_no_trace(
    tmp_path, layout, flags, saving, plan
):
    settings = "--deadpool-nonfinite rollback"
    options = {"flags": flags, "saving": saving, "settings": settings}
    outcome = jobs.strike(tmp_path / "run", layout, ITERATIONS, [plan], **options)
    (recovery,) = outcome.final["recoveries"]
    assert (recovery["kind"], recovery["generation"]) == ("nonfinite-loss", [1, 8])
    (report,) = outcome.of_kind("nonfinite")
    number = "loss" if plan is LOST else "gradient norm"
    assert (report.iteration, report.data["number"], report.data["policy"]) == (
        9,
        number,
        "rollback",
    )


def test_chain_of_resumed_runs_equals_a_single_run(tmp_path):
    """Each but the last ends with a NaN, and with the newest state before it that was kept."""
    settings = "--deadpool-cadence 3 --deadpool-max-lag 1"
    resume: tuple[str, ...] = ()
    for number, iteration in enumerate((4, 7, 9, None)):
        spoiled = [] if iteration is None else [{**SPOILED, "match": {"iteration": iteration}}]
        directory = tmp_path / str(number)
        run = jobs.run_job(
            directory, layouts.PP2_DP2, ITERATIONS, spoiled, arguments=resume, settings=settings
        )
        if iteration is not None:
            assert run.status == 4, run.story()
            assert run.of_kind("dumped")[0].data["generation"][1] < iteration
        resume = ("--resume", str(directory))
    jobs.assert_unnoticed(run, jobs.reference(layouts.PP2_DP2, ITERATIONS), [])


@pytest.mark.parametrize("point", ["forward", "evaluation.microbatch", "save.begin"])
def test_an_exception_costs_half_a_second_that_is_counted(tmp_path, point):
    """Its process reports it and ends; its peers keep theirs."""
    plan = [jobs.fault("bug", point, when_iteration=6, when_role=1, action="raise")]
    flags, saving = "--eval-interval 3 --eval-iters 2", f"{SAVES} 3"
    outcome = jobs.strike(
        tmp_path / "run", layouts.PP2_DP2, ITERATIONS, plan, flags=flags, saving=saving
    )
    (recovery,) = outcome.final["recoveries"]
    assert recovery["kind"] == "process-crash"
    assert "RuntimeError: raised by fault bug" in recovery["cause"]
    assert GRACE_SECONDS / 2 < recovery["phases"]["detect"] < Settings().close_seconds
    assert [lost.node for lost in outcome.of_kind("member-lost")] == [1]


@pytest.mark.parametrize("communicator", ["gloo", KIND])
def test_a_slow_node_is_reported_and_its_roles_go_to_the_spare(tmp_path, communicator):
    """With NCCL no host waits for the others: marks in the streams show which node delays them."""
    plain = jobs.trainer(layouts.FOUR_SHARDS, 80)
    slow = jobs.Program((SLOW_TRAINER, "2", "0.2", *plain.command[2:]), layouts.FOUR_SHARDS.nodes)
    settings = f"--deadpool-communicator {communicator} --deadpool-evict-slow on"
    outcome = jobs.run_program(tmp_path / "run", slow, spares=1, settings=settings)
    assert outcome.status == 0, outcome.story()
    first = outcome.of_kind("slow-node")[0]
    assert (first.node, first.data["over"]) == (2, False)
    assert first.data["factor"] > SLOW_FACTOR
    (recovery,) = outcome.final["recoveries"]
    assert recovery["kind"] == "planned"
    assert recovery["seats_changed"]["2"][1][0] == 4
    assert recovery["steps_recomputed"] == 0
    assert "is slow" in outcome.output
    assert [bad.kind for bad in read_bad_nodes(tmp_path)] == ["slow-node"]


def test_a_device_that_is_gone_costs_its_node_and_not_the_run(tmp_path):
    """The successor of a dead process finds no GPU: the spare takes the role."""
    plain, plan = (
        jobs.trainer(layouts.PP2_DP2, ITERATIONS),
        [jobs.fault("kill", "optimizer.before", **WHERE)],
    )
    struck = jobs.Program((GPU_TRAINER, "1", *plain.command[2:]), layouts.PP2_DP2.nodes)
    settings = f"--deadpool-communicator {KIND}"
    outcome = jobs.run_program(tmp_path / "run", struck, plan, spares=1, settings=settings)
    jobs.assert_unnoticed(outcome, jobs.reference(layouts.PP2_DP2, ITERATIONS), plan)
    (quarantined,) = outcome.of_kind("node-quarantined")
    assert (quarantined.node, quarantined.data["kind"]) == (1, "device-error")
    assert "RuntimeError: No CUDA GPUs are available" in quarantined.data["cause"]
    assert outcome.final["recoveries"][-1]["seats_changed"]["1"][1][0] == 4
    ends = [lost.data["incarnation"] for lost in outcome.of_kind("member-lost") if lost.node == 1]
    assert ends == [0, 1], "it is tried twice only"


@pytest.mark.parametrize("communicator", ["gloo", KIND])
def test_the_role_that_hangs_is_named_and_the_others_keep_their_processes(tmp_path, communicator):
    """With NCCL no host waits in a communication: marks of the devices show the missing role."""
    plain = jobs.trainer(layouts.PP2_DP2, ITERATIONS)
    hanging = jobs.Program((HANGING_TRAINER, "1", "20", *plain.command[2:]), layouts.PP2_DP2.nodes)
    settings = f"--deadpool-communicator {communicator} --deadpool-hang-seconds 5"
    outcome = jobs.run_program(tmp_path / "run", hanging, spares=0, settings=settings)
    assert outcome.status == 0, outcome.story()
    (recovery,) = outcome.final["recoveries"]
    assert recovery["kind"] == "hang"
    assert list(recovery["seats_changed"]) == ["1"]
    assert "role 1" in recovery["cause"]
    (stack,) = outcome.of_kind("stack")
    assert (stack.role, "forward" in str(stack.data["frames"])) == (1, True)
    (failure,) = json.loads(deadpool("report", "--json", str(tmp_path / "run")).stdout)["failures"]
    (hang,) = failure["hangs"]
    assert hang["roles"] == [1]
    groups = {group["group"]: group for group in hang["groups"]}
    group = groups["DATA_PARALLEL_GROUP_WITH_CP(0,1)"]
    missing, waits = group["rows"]
    assert (missing["roles"], missing["where"]) == ([1], "missing")
    assert (waits["roles"], waits["where"]) == ([0], "waits")
    assert missing["begun"] == group["number"] - 1
    assert ("ended" in missing) == (communicator == KIND)


@pytest.mark.parametrize("way", ["one-by-one", "side-by-side", "split"])
def test_a_lost_node_leaves_no_trace_in_whatever_way_communicators_are_made(tmp_path, way):
    settings = f"--deadpool-communicator {KIND} --deadpool-set rebuild={way}"
    lost = jobs.fault("lost", "backward", when_role=1, when_iteration=5, target="node")
    options = {"spares": 1, "settings": settings}
    outcome = jobs.strike(tmp_path / "run", layouts.PP2_DP2, ITERATIONS, [lost], **options)
    (recovery,) = outcome.final["recoveries"]
    assert recovery["kind"] == "node-lost"


def audit_findings(outcome: jobs.Outcome) -> list[tuple[int | None, list[int], bool]]:
    """Return iteration, roles and certainty of each audit that found a difference."""
    found = outcome.of_kind("audit-failed")
    return [(event.iteration, event.data["roles"], event.data["certain"]) for event in found]


def test_flipped_bits_name_their_nodes_and_leave_no_trace(tmp_path):
    """A weight, a shard of the optimizer's state, a gradient, what a forward pass gives: each time
    of a node that has a spare.

    The audited role is another one in each iteration: of four peers it is 2 in iteration 6, and 3
    in iteration 7.
    """
    plan = [
        jobs.fault("weight", "audit.weight", when_role=1, when_iteration=4, action="mark"),
        jobs.fault("shard", "audit.state", when_role=2, when_iteration=6, action="mark"),
        jobs.fault("gradient", "audit.gradient", when_role=3, when_iteration=7, action="mark"),
        jobs.fault("pass", "audit.pass", when_role=0, when_iteration=10, action="mark"),
    ]
    run = tmp_path / "run"
    outcome = jobs.strike(run, layouts.FOUR_SHARDS, ITERATIONS, plan, spares=4, settings=AUDITED)
    assert audit_findings(outcome) == [
        (4, [1], True),
        (6, [2], True),
        (7, [3], True),
        (10, [0], True),
    ]
    recoveries = outcome.final["recoveries"]
    assert [r["kind"] for r in recoveries] == ["silent-corruption"] * 4
    assert [r["generation"][1] for r in recoveries] == [3, 5, 6, 9], "nothing wrong was kept"
    assert [e.node for e in outcome.of_kind("node-quarantined")] == [1, 2, 3, 0]
    assert {bad.kind for bad in read_bad_nodes(run.parent)} == {"silent-corruption"}
    assert {e.iteration for e in outcome.of_kind("audited")} == set(range(1, ITERATIONS + 1))


def test_two_peers_that_repeat_their_results_name_no_culprit(tmp_path):
    """The state before is saved, and the run ends rather than train on."""
    where = {"when_role": 1, "when_iteration": 4, "action": "mark"}
    plan = [jobs.fault(name, "audit.pass", **where) for name in ("pass", "pass-once-more")]
    outcome = jobs.run_job(tmp_path / "run", layouts.PP2_DP2, ITERATIONS, plan, settings=AUDITED)
    assert outcome.status == 3, outcome.story()
    assert "node 0 and node 1" in outcome.final["reason"]


def test_peer_that_does_not_repeat_its_result_is_the_culprit(tmp_path):
    """A single flip in a pass, and one in an update that is computed again."""
    plan = [
        jobs.fault("pass", "audit.pass", when_role=1, when_iteration=4, action="mark"),
        jobs.fault("update", "audit.update", when_role=3, when_iteration=7, action="mark"),
    ]
    outcome = jobs.strike(
        tmp_path / "run", layouts.PP2_DP2, ITERATIONS, plan, spares=2, settings=AUDITED
    )
    assert audit_findings(outcome) == [(4, [1], True), (7, [3], True)]
    assert [e.node for e in outcome.of_kind("node-quarantined")] == [1, 3]


@pytest.mark.parametrize(
    ("pipeline", "role"),
    [(layouts.PIPELINE, 1), (layouts.VIRTUAL.flags, 4)],
    ids=["plain", "interleaved"],
)
def test_the_stage_that_computed_a_pass_wrong_is_named_not_its_replica(pipeline, role, tmp_path):
    """Of three replicas of two stages a stage of the second passes on a wrong result, from which
    its later stage computes, and in an interleaved pipeline even the first stage."""
    layout = jobs.Layout("pp2-dp3", pipeline, nodes=6, members_per_node=1)
    plan = [jobs.fault("pass", "audit.pass", when_role=role, when_iteration=4, action="mark")]
    flags = "--global-batch-size 12"
    outcome = jobs.strike(
        tmp_path / "run", layout, ITERATIONS, plan, spares=1, flags=flags, settings=AUDITED
    )
    assert audit_findings(outcome) == [(4, [role], True)]
