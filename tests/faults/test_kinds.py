"""Kinds of failure in the embedded trainer: a poisoned loss, a slow node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness.jobs import Layout, Program, fault, run_program, strike, trainer
from tests.faults.harness.layouts import DISTRIBUTED, PP2_DP2

pytestmark = pytest.mark.slow
# As in other tests of this layout, so that they share one undisturbed run.
ITERATIONS = 12
DP4 = Layout("dp4", DISTRIBUTED, nodes=4, members_per_node=1)
HANGING_TRAINER = str(Path(__file__).parent / "harness" / "hanging_trainer.py")
SLOW_TRAINER = str(Path(__file__).parent / "harness" / "slow_trainer.py")


def test_a_poisoned_loss_is_rolled_back_and_leaves_no_trace(tmp_path: Path) -> None:
    plan = [fault("nan", "loss", when_iteration=5, action="mark")]
    settings = "--deadpool-nonfinite rollback"
    outcome = strike(tmp_path / "run", PP2_DP2, ITERATIONS, plan, settings=settings)
    (recovery,) = outcome.final["recoveries"]
    assert recovery["kind"] == "nonfinite-loss"
    assert recovery["generation"][1] == 4
    (told,) = outcome.of_kind("nonfinite")
    assert (told.iteration, told.data["policy"]) == (5, "rollback")


@pytest.mark.full
def test_a_slow_node_is_reported_and_its_roles_go_to_the_spare(tmp_path: Path) -> None:
    plain = trainer(DP4, 54)
    slow = Program((SLOW_TRAINER, "2", "0.25", *plain.command[2:]), DP4.nodes)
    outcome = run_program(tmp_path / "run", slow, spares=1, settings="--deadpool-evict-slow on")
    assert outcome.status == 0, outcome.story()
    first = outcome.of_kind("slow-node")[0]
    assert (first.node, first.data["over"]) == (2, False)
    assert first.data["factor"] > 1.5
    (recovery,) = outcome.final["recoveries"]
    assert recovery["kind"] == "drained"
    assert recovery["seats_changed"]["2"][1][0] == 4
    assert recovery["steps_recomputed"] == 0
    assert "is slow" in outcome.output


@pytest.mark.parametrize("communicator", ["gloo", "fake-nccl"])
def test_the_role_that_hangs_is_named_and_the_others_keep_their_processes(
    tmp_path: Path, communicator: str
) -> None:
    """With NCCL no host waits in a communication: what the devices do tells who is missing."""
    plain = trainer(PP2_DP2, ITERATIONS)
    hanging = Program((HANGING_TRAINER, "1", "20", *plain.command[2:]), PP2_DP2.nodes)
    settings = f"--deadpool-communicator {communicator} --deadpool-hang-seconds 5"
    outcome = run_program(tmp_path / "run", hanging, spares=0, settings=settings)
    assert outcome.status == 0, outcome.story()
    (recovery,) = outcome.final["recoveries"]
    assert recovery["kind"] == "hang"
    assert list(recovery["seats_changed"]) == ["1"]
    assert "role 1" in recovery["cause"]
    (stack,) = outcome.of_kind("stack")
    assert (stack.role, "forward" in str(stack.data["frames"])) == (1, True)
