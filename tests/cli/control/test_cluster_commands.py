"""Agents started one by one, and what clean-up finds."""

import os
import shutil
import signal

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from deadpool_megatron.settings import Settings
from tests.cluster.counting_member import expected_sha256
from tests.cluster.runs import FAST, MEMBER, Run, deadpool, start
from tests.common.finished_run import read_final
from tests.common.wait import MAX_WAIT_SECONDS, wait_for


@pytest.mark.full
@pytest.mark.slow
def test_agent_without_the_run_directory(tmp_path):
    """It has only an address, an id and the secret; the other one coordinates."""
    run = RunDirectory(tmp_path / "r")
    size = ("--nodes", "2", "--nproc-per-node", "1", *FAST)
    member = ("--preload", "", "--", MEMBER, "--iterations", "10")
    place = ("--run-dir", str(run.path), "--node-id", "1")
    first = start(tmp_path / "first.out", "agent", *place, *size, *member)
    wait_for("the coordinator to listen", run.coordinator.exists)
    found = read_json(run.coordinator)
    secret = (run.path / "secret").read_text()
    run_id = run.read_run().run_id
    # The counting members meet in a file of the run directory: share that alone.
    far = tmp_path / "far"
    far.mkdir()
    (far / "lockstep").symlink_to(run.path / "lockstep")
    address = ("--coordinator", f"{found['host']}:{found['port']}", "--run-id", run_id)
    away = ("agent", "--run-dir", str(far), "--node-id", "0", "--preload", "")
    second = start(tmp_path / "second.out", *away, *address, DEADPOOL_SECRET=secret)
    assert first.wait(MAX_WAIT_SECONDS) == 0
    assert second.wait(MAX_WAIT_SECONDS) == 0
    assert not list((far / "journal").iterdir()), "no standby looks into a journal of its own"
    final = read_final(run.path)
    assert final["exit_status"] == 0
    assert final["roles"]["1"]["sha256"] == expected_sha256(1, 10)
    assert not segment_root(run_id).exists()


@pytest.mark.full
@pytest.mark.slow
def test_agent_with_a_node_id_that_is_taken_is_refused(tmp_path):
    with Run(tmp_path / "r", spares=0) as run:
        run.wait_iteration(2)
        pids = read_json(run.run.node(0))
        twin = deadpool("agent", "--run-dir", str(run.run.path), "--node-id", "0", "--preload", "")
        assert twin.returncode == 2
        assert "node 0 already has an agent" in twin.stderr
        assert read_json(run.run.node(0)) == pids
        final = run.finish()
    assert final["recoveries"] == []


@pytest.mark.slow
def test_clean_removes_dead_runs_only(tmp_path):
    with Run(tmp_path / "r") as run:
        run.wait_iteration(2)
        refused = deadpool("clean", str(run.run.path))
        assert refused.returncode == 2
        assert "is alive" in refused.stderr
        # Everything that could clean up dies in the same instant: only orphans are left.
        info = run.run.read_run()
        listings = run.run.node_listings()
        coordinator = read_json(run.run.coordinator)["pid"]
        watchers = [run.launcher.pid, coordinator, *(one["agent"] for one in listings.values())]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in watchers:
                os.kill(pid, number)
        run.launcher.wait()
        vaults = [int(one["vault"]) for one in listings.values()]
        nice = {os.getpriority(os.PRIO_PROCESS, pid) for pid in vaults}
        assert nice == {min(19, os.nice(0) + Settings.vault_nice)}
        posix.wait_until_ended(watchers, MAX_WAIT_SECONDS)
        wait_for(
            "members to end", lambda: set(cleanup.run_processes(run.run, info.run_id)) <= {*vaults}
        )
        assert all(posix.is_alive(pid) for pid in vaults)
        assert segment_root(info.run_id).exists()
        assert f"run {info.run_id} holds " in deadpool("clean").stdout, "it is left alone"
        assert "MiB in memory" in cleanup.remaining_memory(run.run)
        done = deadpool("clean", "--yes", str(run.run.path))
        assert done.returncode == 0, done.stderr
        assert f"run {info.run_id}: " in done.stdout
        assert not any(posix.is_alive(pid) for pid in vaults)
        assert not segment_root(info.run_id).exists()
        assert cleanup.run_processes(run.run, info.run_id) == []
        assert "nothing" in cleanup.remaining_memory(run.run)


def test_clean_removes_memory_of_a_run_whose_directory_is_gone(tmp_path):
    run = RunDirectory(tmp_path / "gone")
    run.path.mkdir()
    os.close(cleanup.claim_segments(run, "7e57907e"))
    shutil.rmtree(run.path)
    try:
        done = deadpool("clean")
        assert "run 7e57907e: 0 processes killed" in done.stdout
        assert not segment_root("7e57907e").exists()
    finally:
        shutil.rmtree(segment_root("7e57907e"), ignore_errors=True)
