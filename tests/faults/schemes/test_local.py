"""``local`` and ``local-twice``: processes may crash, a lost node is for the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import layouts
from tests.faults.harness.jobs import fault, recomputed, restart_kinds, run_job, strike

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.full]
LAYOUT = layouts.PP2_DP2
ITERATIONS = 12
LOCAL = "--deadpool-protection local"


def test_crashes_go_on_from_memory_a_lost_node_from_the_checkpoint(tmp_path: Path) -> None:
    """A member, then all processes of a node but its agent, then the whole node."""
    plan = [
        fault("member", "optimizer.inside", when_role=0, when_iteration=3, signal="SEGV"),
        fault("vault", "forward", when_role=2, when_iteration=5, target="vault"),
        fault("members", "backward", when_role=2, when_iteration=5, target="members"),
        fault("node", "backward", when_role=1, when_iteration=9, target="node"),
    ]
    saves = f"--save {tmp_path / 'saves'} --save-interval 6"
    outcome = strike(
        tmp_path / "run", LAYOUT, ITERATIONS, plan, saving=saves, settings=LOCAL, spares=1
    )
    assert restart_kinds(outcome) == ["initial", "memory", "memory", "durable"]
    assert recomputed(outcome)[-1] == 2


def test_a_lost_node_without_a_checkpoint_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    plan = [fault("node", "backward", when_role=1, when_iteration=2, target="node")]
    outcome = run_job(tmp_path / "run", LAYOUT, ITERATIONS, plan, settings=LOCAL, spares=1)
    assert outcome.status == 1, outcome.story()
    (line,) = [one for one in outcome.output.splitlines() if "--deadpool-protection local" in one]
    assert "keeps the state of a node on that node only" in line
    assert outcome.final["reason"].startswith("--deadpool-protection local")


def test_a_damaged_slot_costs_nothing_where_it_is_there_twice(tmp_path: Path) -> None:
    """Of a process that dies when the generation is committed. With ``local`` all would go back to
    the one before, with no more damage than this."""
    plan = [
        fault("damage", "vault.doubled", when_role=2, when_iteration=5, action="mark"),
        fault("death", "optimizer.inside", when_role=2, when_iteration=6),
    ]
    settings = "--deadpool-protection local-twice"
    outcome = strike(tmp_path / "run", LAYOUT, ITERATIONS, plan, settings=settings)
    assert restart_kinds(outcome) == ["initial", "memory"]
    assert recomputed(outcome) == [0]
    (found,) = outcome.of_kind("corruption")
    assert str(found.data["where"]).startswith("slot own-2-")
