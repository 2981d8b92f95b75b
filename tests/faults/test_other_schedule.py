"""A start whose command has another learning rate than the state: it is refused, or asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory.directory import read_json
from tests.faults.harness.jobs import Layout, Outcome, logged, run_job
from tests.faults.test_restart import take_all_down

pytestmark = [pytest.mark.slow, pytest.mark.full]
LAYOUT = Layout("stages", "--pipeline-model-parallel-size 2 --lr-decay-style constant", 2)
REFUSED = "max_lr is 0.01 in the state and 0.001 on the command line"
LONG, STOPPED = 40, 8


def dump(directory: Path) -> None:
    command = ("stop", "--dump", "--wait", "100", str(directory))
    subprocess.run([sys.executable, "-m", "deadpool_megatron", *command], check=False)


def rates(outcome: Outcome, after: int) -> set[float]:
    """Return the learning rates of the iterations since the newest start."""
    steps = [event for event in outcome.of_kind("step") if (event.iteration or 0) > after]
    return {float.fromhex(event.data["learning_rate"]) for event in steps}


@pytest.mark.parametrize("source", ["memory", "dump", "checkpoint"])
def test_a_lower_rate_counts_only_where_it_is_asked_for(tmp_path, source):
    first, saving = tmp_path / "run", f"--save {tmp_path / 'saves'} --save-interval {STOPPED}"
    if source == "checkpoint":
        begun = run_job(first, LAYOUT, STOPPED, flags=saving)
        reached = STOPPED
    else:
        strike = take_all_down if source == "memory" else dump
        begun = run_job(first, LAYOUT, LONG, when_stepping=(STOPPED, lambda: strike(first)))
        reached = max(event.iteration or 0 for event in begun.of_kind("step"))
    assert rates(begun, 2) == {0.01}  # after the warm-up

    def start(name: str, flags: str) -> Outcome:
        flags = f"{saving} {flags}" if source == "checkpoint" else flags
        if source == "memory":
            return run_job(first, LAYOUT, LONG, flags=flags)
        return run_job(
            tmp_path / name, LAYOUT, LONG, flags=flags, arguments=["--resume", str(first)]
        )

    refused = start("refused", "--lr 1e-3")
    assert refused.status == 2, refused.story()
    # Another line names the command that continues from memory.
    last = refused.output.splitlines()[-2 if source == "memory" else -1]
    assert REFUSED in last
    assert "--override-opt-param-scheduler" in last
    if source == "memory":
        assert read_json(first / "final.json")["slots_kept"]
    lower = start("lower", "--lr 1e-3 --override-opt-param-scheduler")
    assert lower.status == 0, lower.story()
    assert rates(lower, reached + 1) == {0.001}
    assert f"{REFUSED}, which counts" in logged(lower)
