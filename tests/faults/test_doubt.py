"""Checkpoints that are damaged while the run trains: the newest that is whole is gone on from."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory.cleanup import end_processes
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from tests.faults.harness.jobs import assert_unnoticed, reference, restart_kinds, run_job
from tests.faults.harness.layouts import WHOLE_NODES

pytestmark = [pytest.mark.slow, pytest.mark.full]
ITERATIONS = 20


def test_the_newest_is_cut_short_and_the_one_before_removed(tmp_path: Path) -> None:
    run, saves = RunDirectory(tmp_path / "run"), tmp_path / "saves"

    def strike() -> None:
        """Nothing moves while the checkpoints are damaged; then the node is lost."""
        listing = run.node_listings()[0]
        for pid in listing["members"].values():
            os.kill(pid, signal.SIGSTOP)
        for shard in (saves / "iter_0000015").glob("*.distcp"):
            os.truncate(shard, 1000)
        shutil.rmtree(saves / "iter_0000010")
        end_processes([*map(int, listing["started"])])

    outcome = run_job(
        run.path,
        WHOLE_NODES,
        ITERATIONS,
        flags=f"--save {saves} --save-interval 5",
        settings="--deadpool-protection local",
        spares=1,
        when_stepping=(16, strike),
    )
    assert_unnoticed(outcome, reference(WHOLE_NODES, ITERATIONS), [])
    assert restart_kinds(outcome) == ["initial", "durable", "durable"], outcome.story()
    restored = [event.data["generation"][1] for event in outcome.of_kind("epoch-decided")]
    assert restored == [0, 15, 5]
    told = " ".join(str(event.data["text"]) for event in outcome.of_kind("log"))
    assert "iter_0000015 is struck off" in told
    assert "iter_0000010 is not there any more" in told
    # What was saved again in the place of the damaged one counts, and is whole.
    paths = [event.data["path"] for event in outcome.of_kind("durable")]
    assert paths.count(str(saves / "iter_0000015")) == 2
    assert (
        len({shard.stat().st_size > 1000 for shard in (saves / "iter_0000015").glob("*.distcp")})
        == 1
    )
