"""Events are written in a thread of their own, whatever the file system does."""

import errno
import os
import threading
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator import files
from deadpool_megatron.cluster.coordinator.files import EventWriter
from deadpool_megatron.events import Event, EventLog, Kind, event_files, read_events
from tests.common.wait import MAX_WAIT_SECONDS, wait_for


class Disk(EventLog):
    """Files that are full after ``free`` bytes, or that do not answer."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.free: int | None = None
        self.error = errno.ENOSPC
        self.refused = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self.synced = 0

    def append(self, lines: bytes) -> int:
        self.asked.set()
        assert self.answers.wait(MAX_WAIT_SECONDS)
        if self.free is not None:
            lines = lines[: self.free]
            if not lines:
                self.refused.set()
                raise OSError(self.error, os.strerror(self.error))
            self.free -= len(lines)
        return super().append(lines)

    def sync(self) -> None:
        self.synced += 1
        super().sync()


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "events.jsonl")
    yield made
    made.answers.set()


def step(iteration: int) -> Event:
    return Event(Kind.STEP, 1, role=0, iteration=iteration, data={"loss": "0x1p+0"})


def steps(directory: Path) -> list[int | None]:
    events = read_events(directory / "events.jsonl")
    return [event.iteration for event in events if event.kind is Kind.STEP]


def texts(directory: Path) -> list[str]:
    events = read_events(directory / "events.jsonl")
    return [str(event.data["text"]) for event in events if event.kind is Kind.LOG]


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_events_that_a_full_disk_refused_are_written_later(disk, tmp_path, number):
    disk.free, disk.error = 250, number  # it ends in the middle of a line
    writer = EventWriter(disk)
    for k in range(1, 101):
        writer.write(step(k))
    assert disk.refused.wait(MAX_WAIT_SECONDS)
    while not (status := writer.describe())["trouble"]:
        disk.refused.clear()
        assert disk.refused.wait(MAX_WAIT_SECONDS)
    assert os.strerror(number) in status["trouble"]
    assert status["waiting"] > 0
    disk.free = None
    assert writer.close(MAX_WAIT_SECONDS) == 0
    assert steps(tmp_path) == list(range(1, 101))
    (text,) = texts(tmp_path)
    assert f"{os.strerror(number)}; 0 were dropped" in text
    assert disk.synced


def test_large_event_file_is_followed_by_another(tmp_path):
    path = tmp_path / "events.jsonl"
    for term in (1, 2):
        writer = EventWriter(EventLog(path, term, part_bytes=1000))
        for k in range(40 * term - 39, 40 * term + 1):
            writer.write(step(k))
            while writer.describe()["waiting"]:
                os.sched_yield()
        assert writer.close(MAX_WAIT_SECONDS) == 0
    assert steps(tmp_path) == list(range(1, 81))
    names = [file.name for file in event_files(path)]
    assert names[:2] == ["events.jsonl", "events-0001-0002.jsonl"]
    assert names[names.index("events-0002.jsonl") + 1] == "events-0002-0002.jsonl"
    assert all(file.stat().st_size < 2000 for file in event_files(path))


def test_waiting_events_are_shown_until_they_are_written(disk, tmp_path, monkeypatch):
    """The second time without those of the first."""
    monkeypatch.setattr(files, "_RETRY_SECONDS", 0.01)
    writer = EventWriter(disk)
    for number, text in enumerate(("first", "second"), 1):
        disk.free = 0
        writer.write(Event(Kind.NODE_LOST, 1, 0, data={"cause": text}))
        wait_for("trouble", lambda: writer.describe()["trouble"])
        shown = writer.describe()
        assert [event["data"]["cause"] for event in shown["unwritten"]] == [text]
        assert (shown["waiting"], shown["why"]) == (1, "No space left on device")
        assert shown["seconds"] > 0.0
        disk.free = None
        wait_for("all", lambda: not writer.describe()["waiting"])
        wait_for("the warning", lambda number=number: len(texts(tmp_path)) == number)
        assert "No space left on device; 0 were dropped" in texts(tmp_path)[-1]
    assert writer.close(10.0) == 0
