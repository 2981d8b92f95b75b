"""Following the events of a run that has many files."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.cli.show import tail
from deadpool_megatron.events import Event, EventLog, Kind, to_line


def write_steps(path: Path, count: int, part_bytes: int) -> None:
    log = EventLog(path, part_bytes=part_bytes)
    for iteration in range(1, count + 1):
        log.append(to_line(Event(Kind.STEP, iteration=iteration)))
    log.close()


def test_files_longer_than_a_piece_are_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be a little longer than a piece; and one look takes no more than a piece."""
    monkeypatch.setattr(tail, "_PIECE_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    write_steps(path, 100, part_bytes=1000)
    follower = tail.EventTail(path)
    found: list[int | None] = []
    most = 0
    while events := follower.poll():
        found += [event.iteration for event in events]
        most = max(most, len(events))
    assert found == list(range(1, 101))
    assert most < 20
