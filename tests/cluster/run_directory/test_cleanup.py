"""Removing what a run has left, beside a process of it that has not ended yet."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import LOGS, RunDirectory, write_json
from deadpool_megatron.cluster.run_directory.slots import take_up

RUN_ID = "0123abcd"


def test_a_file_that_goes_and_one_that_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that copies the logs of a lost agent replaces its own file until the end."""
    root = tmp_path / "shared"
    logs = root / "node0" / LOGS
    logs.mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    (logs / "agent.log").write_bytes(bytes(4096))
    coming = logs / "..copied.7"
    coming.write_text("{}")
    monkeypatch.setattr(cleanup, "segment_root", lambda run_id: root)
    lstat, rmtree, late = Path.lstat, shutil.rmtree, [coming]

    def goes(path: Path) -> os.stat_result:
        if path == coming:
            path.unlink(missing_ok=True)
        return lstat(path)

    def comes(path: Path, ignore_errors: bool) -> None:
        rmtree(path, ignore_errors=ignore_errors)
        if late:  # it was made between the removal of the other files and that of the directory
            late[0].parent.mkdir(parents=True)
            late.pop().write_text("{}")

    monkeypatch.setattr(Path, "lstat", goes)
    monkeypatch.setattr(cleanup.shutil, "rmtree", comes)
    cleaned = cleanup.clean_run(RunDirectory(tmp_path / "run"), RUN_ID)
    assert not root.exists()
    assert not late
    assert cleaned.nbytes >= 4096


@pytest.mark.parametrize(
    "text", ['{"started": []}', '{"started": null}', '{"started": {"1": [2]}}', "[]", "{"]
)
def test_a_listing_of_another_form_names_no_process(text: str, tmp_path: Path) -> None:
    """The launcher reads that of the coordinator all the time, and ended its run at one."""
    run = RunDirectory(tmp_path)
    run.node(0).parent.mkdir()
    for path in (run.coordinator, run.node(0)):
        path.write_text(text)
    assert cleanup.coordinator_processes(run) == []
    assert cleanup.node_processes(run, 0) == []


def test_nodes_of_other_hosts_stay_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes cannot be seen from here; what follows the run finds them by these files."""
    monkeypatch.setattr(cleanup, "segment_root", lambda run_id: tmp_path / "shared")
    run = RunDirectory(tmp_path / "run")
    run.node(0).parent.mkdir(parents=True)
    for node, hostname in enumerate((socket.gethostname(), "elsewhere")):
        write_json(run.node(node), {"agent": 1, "hostname": hostname, "started": {}})
    cleanup.clean_run(run, RUN_ID)
    assert list(run.node_listings()) == [1]


def test_slots_of_a_node_whose_agent_is_yet_to_come_are_not_taken_up(tmp_path: Path) -> None:
    """All agents of one command come at about the same time."""
    run, run_id = RunDirectory(tmp_path), uuid.uuid4().hex[:8]
    os.close(cleanup.claim_segments(run, run_id))
    own, other = run.segments(run_id, 2), run.segments(run_id, 1)
    try:
        for directory in (own, other):
            directory.mkdir(mode=0o700)
        (other / "own-0.0.0.0.seg").touch()
        assert take_up(run, run_id, own, {0, 1, 2}) is None
        assert take_up(run, run_id, own, {0, 2}) == 1
        assert not other.exists()
    finally:
        shutil.rmtree(own.parent, ignore_errors=True)
