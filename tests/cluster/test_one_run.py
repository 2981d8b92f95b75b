"""A run is its id: files of another run in its directory are not used."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.events import Kind
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import auth
from tests.cluster.runs import MEMBER, Run, deadpool, send
from tests.common.wait import MAX_WAIT_SECONDS

pytestmark = pytest.mark.slow
ENDLESS = ("--step-seconds", "0.02")
OTHER = "0123abcd"


def finished_run(path: Path) -> run_files.RunDirectory:
    """Another run, which is over."""
    run = run_files.RunDirectory(path)
    run.create(run_files.RunInfo(OTHER, 2, 2, 0, 1, ("x.py",), Settings()))
    auth.create_secret(path)
    run_files.write_json(
        run.final, {"exit_status": 0, "reason": "done", "iterations": 20, "run_id": OTHER}
    )
    return run


def contents(run: run_files.RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_link_that_later_leads_to_another_run_does_not_end_this_run(tmp_path):
    other, link = finished_run(tmp_path / "other"), tmp_path / "link"
    (tmp_path / "own").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "own")
    with Run(link, *ENDLESS, nodes=2, spares=0) as run:
        run.wait_iteration(5)
        before = contents(other)
        link.unlink()
        link.symlink_to(other.path)
        send(run_files.read_json(tmp_path / "own" / "coordinator.json")["pid"])
        run.wait_event(Kind.COORDINATOR, 2)
        run.finish()
    assert contents(other) == before


def test_another_run_with_its_directory_name_is_left_alone(tmp_path):
    """The run that was there is continued under its directory's new name."""
    place, moved = tmp_path / "place", tmp_path / "moved"
    with Run(place, *ENDLESS, nodes=2, spares=0) as run:
        run.wait_iteration(5)
        first = run.newest_iteration()
        place.rename(moved)
        other = finished_run(place)
        before = contents(other)
        run.wait_for("the line", lambda: f"directory of run {OTHER} now" in run.output.read_text())
        run.launcher.send_signal(signal.SIGINT)
        assert run.launcher.wait(MAX_WAIT_SECONDS) == 130
        after = contents(other)
        assert {path: after.get(path) for path in before} == before
        assert {path.parent.name for path in after.keys() - before.keys()} <= {"logs"}
        with Run(moved, *ENDLESS, nodes=2, spares=0) as again:
            again.wait_event(Kind.RECOVERED)
            final = again.finish()
        assert final["iterations"] > first
        shutil.rmtree(place)


def test_directory_removed_under_a_run_is_created_again(tmp_path):
    """The run reports it, answers commands, and loses no state."""
    place = tmp_path / "run"
    with Run(place, *ENDLESS, nodes=2, spares=0) as run:
        run.wait_iteration(5)
        known = run.run.read_run()
        shutil.rmtree(place, ignore_errors=True)  # as rm -rf: something is written meanwhile
        run.wait_for("the line", lambda: "removed under the run" in run.output.read_text())
        status = deadpool("status", "--json", str(place))
        assert status.returncode == 0, status.stderr
        os.kill(run.launcher.pid, signal.SIGINT)
        assert run.launcher.wait(MAX_WAIT_SECONDS) == 130
        assert "MiB in memory" in run.output.read_text().splitlines()[-1]
        with Run(place, *ENDLESS, nodes=2, spares=0) as again:
            again.wait_event(Kind.RECOVERED)
            assert again.run.read_run() == replace(
                known, **{name: getattr(again.run.read_run(), name) for name in RESTARTED}
            )
            again.run.path.joinpath("finish").touch()
            again.wait_over()
    assert "restarted: continues from generation 1:" in "".join(
        str(event.data.get("text")) for event in again.events(Kind.LOG)
    )


RESTARTED = ("ended_term", "ended_epoch", "finished")


def test_training_run_is_not_resumed(tmp_path):
    """Nor where its coordinator has just died."""
    with Run(tmp_path / "old", *ENDLESS, nodes=2, spares=0) as run:
        run.wait_iteration(5)
        command = ("--nodes", "2", "--nproc-per-node", "1", "--preload", "", "--", MEMBER)
        asked = deadpool("run", "--resume", str(tmp_path / "old"), *command)
        assert asked.returncode == 2
        assert "that run is still training, at iteration" in asked.stderr
        send(run_files.read_json(run.run.coordinator)["pid"])
        asked = deadpool("run", "--resume", str(tmp_path / "old"), *command)
        assert asked.returncode == 2
        assert "that run is still training" in asked.stderr
        run.wait_event(Kind.COORDINATOR, 2)
        run.finish()
