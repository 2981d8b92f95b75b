"""Other protection in a running job, parity of every third iteration: what fails is computed again
from there, with evaluations and saves after iterations that are not protected.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import layouts
from tests.faults.harness.jobs import assert_unnoticed, fault, recomputed, reference, run_job

pytestmark = [pytest.mark.slow, pytest.mark.full]
LAYOUT = layouts.PP2_DP2
ITERATIONS = 30
EVERY = 3
EVALUATION = "--eval-interval 4 --eval-iters 2"


def test_a_plan_changes_and_nodes_die_and_the_coordinator_with_them(tmp_path: Path) -> None:
    """What was copied every time comes from parity of every third. The next coordinator finds the
    plan in the journal."""
    directory = tmp_path / "run"
    answers: list[subprocess.CompletedProcess[str]] = []

    def protect() -> None:
        command = [sys.executable, "-m", "deadpool_megatron", "protect", str(directory)]
        wish = [*command, "--scheme", "parity", "--group", "3", "--every", str(EVERY)]
        answers.append(subprocess.run(wish, capture_output=True, text=True, timeout=60))

    plan = [
        # Of four micro-batches the second one of the 11th iteration of the epoch.
        fault("node", "backward", when_role=0, when_epoch=2, nth=42, target="node"),
        fault("coordinator", "coordinator.journal", when_epoch=3),
        fault("evaluation", "evaluation.microbatch", when_role=1, when_iteration=28, target="node"),
    ]
    outcome = run_job(
        directory,
        LAYOUT,
        ITERATIONS,
        plan,
        flags=f"{EVALUATION} --save {tmp_path / 'saves'} --save-interval 5",
        spares=2,
        refill=2,
        when_stepping=(1, protect),
    )
    assert answers[0].returncode == 0, answers[0].stderr
    assert f"parity(3); every {EVERY} iterations" in answers[0].stdout
    assert_unnoticed(outcome, reference(LAYOUT, ITERATIONS, EVALUATION), plan)

    # The coordinator that died had told of the plan in no record: the next one tells it again.
    first, change, *again = outcome.of_kind("protection")
    assert {event.data["new"] for event in again} <= {change.data["new"]}
    assert first.data["new"] == change.data["old"] == "buddy"
    assert (change.epoch, change.data["every"], change.data["most_lost"]) == (2, EVERY, 5)
    assert "deadpool protect" in change.data["why"]
    planned, *failures = recomputed(outcome)
    assert planned == 0, "the pause was after a protected iteration"
    assert len(failures) == 2
    assert max(failures) <= change.data["most_lost"]
    records = [json.loads(p.read_text()) for p in sorted(directory.glob("journal/epoch-*"))]
    later = [record for record in records if record["epoch"] > 2]
    assert [record["protection"]["every"] for record in later] == [EVERY, EVERY]
    assert [record["restore"]["generation"][1] % EVERY for record in later] == [0, 0]
    # 28 is no multiple of 3: its evaluation was interrupted, and the iteration done again; from 24
    # when 27 was still under way.
    assert later[-1]["restore"]["generation"][1] in (24, 27)
