"""The files of a run: events of each term, its name, its result."""

import asyncio
import errno
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import files as run_files
from deadpool_megatron.cluster.coordinator.files import CommitDigest, EventWriter, RunFiles
from deadpool_megatron.cluster.coordinator.progress import ReportedProgress
from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.actions import Finish
from deadpool_megatron.cluster.run_directory.bad_nodes import BadNode, add_bad_node, read_bad_nodes
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, write_json
from deadpool_megatron.events import Event, Kind, read_events
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings
from tests.cluster.machine.rig import Rig
from tests.common.waiting import wait_for


def info() -> RunInfo:
    return RunInfo("ab", 1, 1, 0, 1, ("x.py",), Settings())


async def test_a_cleaner_that_takes_the_run_file_does_not_hide_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "_PAUSE_SECONDS", 0.01)
    run = RunDirectory(tmp_path / "run")
    whole = replace(info(), run_id="0123abcd")
    run.create(whole)
    files = RunFiles(run, whole, 1, ReportedProgress())
    keeping = asyncio.create_task(files.keep_name(lambda: None))
    async with asyncio.timeout(20):
        await asyncio.sleep(0.05)
        (run.path / "run.json").unlink()
        while not (run.path / "run.json").exists():
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert run.read_run() == whole
    files.close(10.0)


@pytest.mark.parametrize(("saved_at", "is_named"), [(4, True), (5, False)])
def test_a_checkpoint_that_must_not_be_used_is_not_named_at_the_end(
    tmp_path: Path, saved_at: int, is_named: bool
) -> None:
    """The loss of iteration 5 was not finite, and nothing of before it was left."""
    run = RunDirectory(tmp_path)
    files = RunFiles(run, info(), 1, ReportedProgress())
    named = Restore("durable", Generation(1, saved_at), path=str(tmp_path))
    write_json(run.latest, named.to_dict())
    rig = Rig()
    rig.alter("blame", poisoned_from=5)
    state = rig.state
    for _ in range(2):  # tried again after an error of the disk
        files.write_result(Finish(4, "not finite"), state, {})
    files.close(10.0)
    assert run.latest.exists() is is_named
    assert run.final.exists()


def test_dates_are_the_coordinators_and_never_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However wrong the clock of the host that saw it, and whatever becomes of this one's."""
    run, began = RunDirectory(tmp_path), time.time()
    files = RunFiles(run, info(), 1, ReportedProgress())
    files.write(Event(Kind.STEP, 1, iteration=1, wall_seconds=5.0, monotonic_seconds=7.0))
    monkeypatch.setattr(time, "time", lambda: began - 3600.0)
    files.write(Event(Kind.STEP, 1, iteration=2, wall_seconds=4.0))
    files.close(10.0)
    monkeypatch.undo()
    first, second = read_events(run.events)
    assert began <= first.wall_seconds <= second.wall_seconds <= time.time()
    assert first.monotonic_seconds == 7.0


def test_what_is_saved_counts_though_nobody_has_told_of_it(tmp_path: Path) -> None:
    """The node that told the numbers was lost with its coordinator."""
    files = RunFiles(RunDirectory(tmp_path), info(), 2, ReportedProgress())
    end = Finish(75, "no spare", Restore("dump", Generation(1, 10), path="/dump/1-10"))
    assert files.result(end, Rig().state)["iterations"] == 10
    files.close(10.0)


class Disk:
    """In place of the event file; ``is_full``: nothing can be written."""

    def __init__(self) -> None:
        self.is_full = True
        self.written = b""

    def append(self, lines: bytes) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += lines
        return len(lines)

    def sync(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is open."""


def test_events_that_wait_are_shown_until_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice; the second time not with those of the first."""
    monkeypatch.setattr(run_files, "_RETRY_SECONDS", 0.01)
    disk: Any = Disk()
    writer = EventWriter(disk)
    for text in ("first", "second"):
        disk.is_full = True
        writer.write(Event(Kind.NODE_LOST, 1, 0, data={"cause": text}))
        wait_for("trouble", lambda: writer.describe()["trouble"])
        shown = writer.describe()
        assert [event["data"]["cause"] for event in shown["unwritten"]] == [text]
        assert (shown["waiting"], shown["why"]) == (1, "No space left on device")
        assert shown["seconds"] > 0.0
        disk.is_full = False
        wait_for("the warning", lambda: disk.written.count(b"could not be written"))
        wait_for("all", lambda: not writer.describe()["waiting"])
        assert disk.written.count(b"No space left on device; 0 were dropped") == 1
        disk.written = b""
    assert writer.close(10.0) == 0


@pytest.mark.parametrize(("known", "is_noted"), [(False, True), (True, False)])
def test_a_host_that_is_left_out_is_noted_once(tmp_path: Path, known: bool, is_noted: bool) -> None:
    """Else what an earlier run has noted of it would never be too old."""
    run = RunDirectory(tmp_path / "run")
    run.create(replace(info(), run_id="0123abcd"))
    for node in (0, 1):
        write_json(run.node(node), {"hostname": f"host{node}", "node": node})
    before = BadNode("host1", "device-error", time.time(), "another", "Xid 79")
    if known:
        add_bad_node(tmp_path, before)
    files = RunFiles(run, replace(info(), run_id="0123abcd"), 1, ReportedProgress())
    data = {"cause": "its device", "kind": FailureKind.LEFT_OUT}
    files.write(Event(Kind.NODE_LOST, 1, 1, data=data))
    files.close(10.0)
    found = [node for node in read_bad_nodes(tmp_path) if node.run == "0123abcd"]
    assert [(node.host, node.kind, node.evidence, node.alone) for node in found] == (
        [("host1", "left-out", "its device", True)] if is_noted else []
    )


def test_a_digest_counts_what_each_commit_says() -> None:
    """The slowest shipment, the shortest window; a commit that says nothing counts as one."""
    digest = CommitDigest()
    full = {"bytes": 10, "released": True, "ship_seconds": 2.0, "window_seconds": 3.0}
    for role, data in ((0, full), (1, {"ship_seconds": 1.0, "window_seconds": 4.0}), (1, {})):
        event = Event(Kind.COMMITTED, 1 + role, role, role, 4 - role, data=data)
        assert digest.add(event, 5.0) is None
    assert digest.add(Event(Kind.SEALED, 9, 0, 0, 9), 99.0) is None
    found = digest.add(Event(Kind.COMMITTED, 1, 0, 0, 4), 5.0 + run_files.PERIOD_SECONDS)
    assert found is not None
    assert (found.epoch, found.iteration) == (2, 4)
    times = {"ship_seconds": 2.0, "window_seconds": 3.0, "commit_seconds": None}
    assert found.data == {"roles": 2, "reports": 4, "released": 1, "bytes": 10, **times}
    assert digest.take() is None
