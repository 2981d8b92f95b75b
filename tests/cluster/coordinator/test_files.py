"""The files of a run: events of each term, its name, its result."""

import asyncio
import errno
from typing import Any

from deadpool_megatron.cluster.coordinator import files as run_files
from deadpool_megatron.cluster.coordinator.files import EventWriter, RunFiles
from deadpool_megatron.cluster.coordinator.progress import ReportedProgress
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.settings import Settings
from tests.common.wait import wait_for


async def test_a_cleaner_that_takes_the_run_file_does_not_hide_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_PAUSE_SECONDS", 0.01)
    run = RunDirectory(tmp_path / "run")
    whole = RunInfo("0123abcd", 1, 1, 0, 1, ("x.py",), Settings())
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


def test_events_that_wait_are_shown_until_they_are_written(monkeypatch):
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
