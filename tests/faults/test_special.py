"""Faults beyond phase x victim: chains of deaths, dead helpers, corruption, names cleaned away."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.files import DETAIL_VARIABLE
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, segment_root
from deadpool_megatron.events import Event, Kind
from tests.common.limits import STOPPED
from tests.faults.harness import jobs, layouts
from tests.faults.harness.cells import EVALUATION_INTERVAL
from tests.faults.harness.jobs import strike as strike_layout

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
FULL = pytest.mark.full
LAYOUT = layouts.PP2_DP2
ITERATIONS = 12
EVALUATION = f"--eval-interval {EVALUATION_INTERVAL} --eval-iters 2"
FIRST = jobs.fault("first", "backward", when_role=0, when_iteration=4, target="node")


def strike(tmp_path: Path, plan: list[dict[str, Any]], **options: Any) -> jobs.Outcome:
    """The job with these faults, with spares for all of them."""
    options = {"spares": 2, "refill": len(plan), **options}
    return strike_layout(tmp_path / "run", LAYOUT, ITERATIONS, plan, **options)


@FULL
@pytest.mark.parametrize("phase", ["restore", "drain", "adopt", "rebuild", "sync", "verify"])
def test_a_survivor_dies_in_each_phase_of_a_recovery(tmp_path, phase):
    """Role 3 holds no copy of role 0, so the state is in memory all the time."""
    epoch = {} if phase == "drain" else {"when_epoch": 2}
    second = jobs.fault("second", f"recovery.{phase}", when_role=3, target="node", **epoch)
    outcome = strike(tmp_path, [FIRST, second], spares=3)
    assert max(jobs.recomputed(outcome)) <= 1


@FULL
@pytest.mark.parametrize("phase", ["adopt", "rebuild", "restore"])
def test_the_spare_dies_while_it_takes_over(tmp_path, phase):
    second = jobs.fault("second", f"recovery.{phase}", when_role=0, when_epoch=2, target="node")
    outcome = strike(tmp_path, [FIRST, second], spares=2)
    assert max(jobs.recomputed(outcome)) <= 1


@FULL
def test_the_coordinator_dies_while_communicators_meet(tmp_path):
    """In a recovery, with half of the addresses reported: its successor continues the epoch."""
    second = jobs.fault("second", "coordinator.store", when_epoch=2, nth=4)
    outcome = strike(tmp_path, [FIRST, second], spares=1)
    assert [event.epoch for event in outcome.of_kind("epoch-opened")] == [1, 2]


@FULL
def test_the_waiting_spare_dies(tmp_path):
    early = jobs.fault(
        "early", "step.begin", when_role=1, when_iteration=2, target="node", nodes=[4]
    )
    strike(tmp_path, [early, FIRST], spares=2)


@FULL
@pytest.mark.parametrize(
    ("point", "match"),
    [
        ("recovery.rebuild", {"when_epoch": 2}),
        ("step.begin", {"when_iteration": 4, "when_epoch": 2}),
        ("forward", {"when_iteration": 5, "when_epoch": 2}),
    ],
    ids=["in-rebuild", "in-replay", "right-after"],
)
def test_then_a_node_dies_whose_copy_the_first_one_held(tmp_path, point, match):
    """With two copies the second loss is in memory too, however soon it comes."""
    second = jobs.fault("second", point, when_role=1, target="node", **match)
    outcome = strike(tmp_path, [FIRST, second], spares=3, settings="--deadpool-copies 2")
    assert set(jobs.restart_kinds(outcome)[1:]) == {"memory"}
    assert max(jobs.recomputed(outcome)) <= 1


@FULL
def test_vault_killed_agent_killed_vault_stopped(tmp_path):
    plan = [
        jobs.fault("vault-killed", "step.begin", when_role=1, when_iteration=3, target="vault"),
        jobs.fault("while-shipping", "vault.ship", when_role=2, when_iteration=5),
        jobs.fault(
            "vault-stopped",
            "step.begin",
            when_role=3,
            when_iteration=7,
            target="vault",
            signal="STOP",
            resume_after_seconds=5,
        ),
        jobs.fault("agent-killed", "backward", when_role=2, when_iteration=9, target="agent"),
    ]
    outcome = strike(tmp_path, plan)
    assert len(outcome.final["recoveries"]) == 1, "only the agent's death changes the epoch"
    waits = [event.data["seconds"] for event in outcome.of_kind("gate-wait")]
    assert max(waits) > 3, "the gate held the iteration until the stopped vault went on"


@FULL
def test_corruption_on_the_wire_and_in_the_slot(tmp_path):
    plan = [
        jobs.fault("wire", "vault.chunk", when_role=1, when_iteration=3, action="mark"),
        jobs.fault("slot", "vault.sealed", when_role=2, when_iteration=5, action="mark"),
        jobs.fault("then-death", "backward", when_role=0, when_iteration=6, target="node"),
    ]
    outcome = strike(tmp_path, plan)
    assert outcome.of_kind("corruption"), "the damaged bytes were found, not loaded"


@FULL
def test_owner_and_buddy_gone_falls_to_the_durable_checkpoint(tmp_path):
    """Nodes 0 and 1 hold each other's copies; the last checkpoint is three iterations old. When the
    next failure leads back to it through memory, the evaluation that it has in it stays done."""
    plan = [
        jobs.fault("both", "backward", when_role=0, when_iteration=9, target="node", nodes=[1, 0]),
        # The restored state is sealed during the forward and backward passes: all have time for it.
        jobs.fault(
            "held",
            "comm",
            when_op="allreduce",
            when_section="optimizer",
            when_role=3,
            when_iteration=7,
            when_epoch=2,
            signal="STOP",
            resume_after_seconds=1.0,
        ),
        jobs.fault("again", "optimizer.updated", when_role=3, when_iteration=7, when_epoch=2),
    ]
    evaluation = "--eval-interval 3 --eval-iters 2"
    saves = f"--save {tmp_path / 'saves'} --save-interval 6"
    # On this machine a new node would find the slots of the dead nodes.
    outcome = strike(tmp_path, plan, flags=evaluation, saving=saves, refill=0)
    assert jobs.restart_kinds(outcome)[-2:] == ["durable", "memory"]
    assert jobs.recomputed(outcome) == [2]


@FULL
def test_evaluation_on_one_replica_and_a_save_on_some_roles(tmp_path):
    plan = [
        jobs.fault(
            "last-microbatch-on-one-replica",
            "evaluation.microbatch",
            when_role=3,
            when_iteration=4,
            target="node",
            nth=8,
        ),
        jobs.fault(
            "before-the-next-step", "step.begin", when_role=1, when_iteration=9, target="node"
        ),
    ]
    outcome = strike(tmp_path, plan, flags=EVALUATION)
    assert [e["iteration"] for e in outcome.final["evaluations"]] == [4, 8, 12]


def struck_while_held(
    directory: Path, role: int, strike: Callable[[], tuple[str, str]]
) -> jobs.Outcome:
    """A role is stopped in iteration 5; then something happens, and a part of the run is killed."""
    held = jobs.fault("held", "backward", when_role=role, when_iteration=5, signal="STOP")

    def kill() -> None:
        command = ("kill", str(directory), *strike())
        subprocess.run(
            [sys.executable, "-m", "deadpool_megatron", *command], check=True, timeout=60
        )

    options = {"spares": 1, "settings": " ".join(STOPPED), "when_stepping": (4, kill)}
    outcome = jobs.run_job(directory, LAYOUT, ITERATIONS, [held], **options)
    jobs.assert_unnoticed(outcome, jobs.reference(LAYOUT, ITERATIONS), [held])
    return outcome


def test_a_node_lost_in_the_backward_pass_costs_no_finished_iteration(tmp_path, monkeypatch):
    """Where the copies of the iteration before had time to leave: they go at once, and not at its
    end."""
    monkeypatch.setenv(DETAIL_VARIABLE, "all")  # each commit of each role is reported
    directory = tmp_path / "run"

    def committed(role: int) -> Callable[[Event], bool]:
        return lambda e: (e.kind, e.role, e.iteration) == (Kind.COMMITTED, role, 4)

    def strike() -> tuple[str, str]:
        for role in range(LAYOUT.roles):
            jobs.await_event(directory, committed(role))
        return "--node", "0"

    assert jobs.recomputed(struck_while_held(directory, 0, strike)) == [0]


@pytest.mark.parametrize(
    ("removed", "victim"),
    [
        ("*", "--role"),
        pytest.param("*", "--node", marks=pytest.mark.full),
        pytest.param("vault.sock", "--role", marks=pytest.mark.full),
    ],
)
def test_a_failure_after_a_clean_up_is_got_over(tmp_path, removed, victim):
    """As by logind with RemoveIPC, or by a cleaner of sockets; the failure comes at once."""
    directory = tmp_path / "run"

    def clean() -> tuple[str, str]:
        root = segment_root(RunDirectory(directory).read_run().run_id)
        if removed == "*":
            shutil.rmtree(root)
        for path in root.glob(f"*/{removed}"):
            path.unlink()
        return victim, "1"

    outcome = struck_while_held(directory, 1, clean)
    assert jobs.restart_kinds(outcome)[1:] == ["memory"], outcome.story()
    assert max(jobs.recomputed(outcome)) <= 1
    assert "were removed, by RemoveIPC of systemd-logind" in outcome.output
