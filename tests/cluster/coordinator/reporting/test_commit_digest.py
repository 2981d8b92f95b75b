"""Commits are told in a line for all roles, and watched one by one."""

from __future__ import annotations

from pathlib import Path

from deadpool_megatron.cluster.coordinator.reporting.commit_digest import (
    PERIOD_SECONDS,
    CommitDigest,
)
from deadpool_megatron.cluster.coordinator.reporting.run_files import RunFiles
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, Kind, read_events, to_line
from tests.cluster.coordinator.reporting.test_results import info

_ROLES, _DAY_SECONDS, _STEP_SECONDS = 512, 24 * 3600.0, 8.0


def committed(role: int, iteration: int, ship_seconds: float = 0.5) -> Event:
    times = {
        "ship_seconds": ship_seconds,
        "window_seconds": 4.0,
        "commit_seconds": 2 * ship_seconds,
    }
    data = {"lineage": 1, "boundary": "step", "released": False, "bytes": 1000, **times}
    return Event(Kind.COMMITTED, 1, role // 8, role, iteration, data=data)


def test_a_day_of_512_roles_is_a_few_megabytes() -> None:
    digest = CommitDigest()
    lines = []
    for k in range(1, 101):
        for role in range(_ROLES):
            line = digest.add(committed(role, k, 0.5 + (role == 7)), k * _STEP_SECONDS)
            lines += [] if line is None else [line]
    last = digest.take()
    assert last is not None
    lines.append(last)
    assert sum(line.data["bytes"] for line in lines) == 100 * _ROLES * 1000, "nothing is lost"
    assert sum(line.data["reports"] for line in lines) == 100 * _ROLES
    assert (last.iteration, lines[0].data["ship_seconds"]) == (100, 1.5)
    assert lines[0].data["commit_seconds"] == 3.0
    seconds = 100 * _STEP_SECONDS
    written = sum(len(to_line(line)) for line in lines) * _DAY_SECONDS / seconds
    assert written < 5e6
    assert len(lines) <= seconds / PERIOD_SECONDS + 1


def test_who_watches_hears_of_every_commit(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    files = RunFiles(run, info(), 1)
    for role in range(4):
        sealed = Event(Kind.SEALED, 1, 0, role, 1, data={"lineage": 1})
        assert files.write(sealed) == [sealed]
        event = committed(role, 1)
        assert files.write(event) == [event]
    files.close(10.0)
    (line,) = read_events(run.events)
    assert (line.role, line.data["roles"], line.data["bytes"]) == (None, 4, 4000)
