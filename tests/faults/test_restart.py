"""Every process of a training run dies, some together with the launcher: not a bit is different."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from tests.faults.harness import layouts
from tests.faults.harness.jobs import (
    assert_unnoticed,
    fault,
    reference,
    restart_kinds,
    run_job,
    run_program,
    trainer,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]
LAYOUT = layouts.PP2_DP2
ITERATIONS = 40
MEMBERS = fault(
    "all", "backward", when_role=1, when_iteration=3, target="members", nodes=[0, 2, 3, 1]
)


def take_all_down(directory: Path) -> None:
    """SIGKILL the launcher; what it leaves ends by itself and keeps the slots."""
    run = RunDirectory(directory)
    agent = int(next(iter(run.node_listings().values()))["agent"])
    launcher = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    left = cleanup.run_processes(run, run.read_run().run_id)
    posix.kill(launcher)
    assert not posix.wait_gone(left, 60)


def test_members_then_everything_then_another_model(tmp_path: Path) -> None:
    """All members; then launcher and coordinator with all; then another model is refused, with the
    slots kept; then the same command goes on."""
    directory = tmp_path / "run"

    def all_of_it() -> None:
        posix.kill(int(read_json(directory / "coordinator.json")["pid"]))
        take_all_down(directory)

    first = run_job(directory, LAYOUT, ITERATIONS, [MEMBERS], when_stepping=(7, all_of_it))
    assert first.status != 0
    assert not (directory / "final.json").exists()
    assert list(segment_root(RunDirectory(directory).read_run().run_id).glob("node*/own-*.seg"))
    # As many bytes in each tensor.
    wrong = run_program(directory, trainer(LAYOUT, ITERATIONS, "--num-attention-heads 8"))
    assert wrong.status == 2, wrong.story()
    assert "the state in memory is of another model" in wrong.output
    assert "num_attention_heads is 4 there and 8 here" in wrong.final["reason"]
    assert read_json(directory / "final.json")["slots_kept"]
    again = run_job(directory, LAYOUT, ITERATIONS, [])
    assert set(restart_kinds(again)[1:]) == {"memory"}, again.story()
    assert_unnoticed(again, reference(LAYOUT, ITERATIONS), [])
    assert "all" in first.fired
    assert "restarted: goes on from generation" in again.output
