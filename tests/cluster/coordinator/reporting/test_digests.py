"""Commits and waits at the gate: told in a line for all roles, and watched one by one."""

from pathlib import Path

from deadpool_megatron.cluster.coordinator.files import PERIOD_SECONDS, RunFiles, WaitDigest
from deadpool_megatron.cluster.coordinator.progress import ReportedProgress
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, Kind, read_events
from deadpool_megatron.observe.story import Story
from tests.cluster.coordinator.test_files import info


def committed(role: int, iteration: int, ship_seconds: float = 0.5) -> Event:
    times = {
        "ship_seconds": ship_seconds,
        "window_seconds": 4.0,
        "commit_seconds": 2 * ship_seconds,
    }
    data = {"lineage": 1, "boundary": "step", "released": False, "bytes": 1000, **times}
    return Event(Kind.COMMITTED, 1, role // 8, role, iteration, data=data)


def waited(role: int, iteration: int, seconds: float = 0.5, *, over: bool = True) -> Event:
    data = {"seconds": seconds, "over": over, "lineage": 1}
    return Event(Kind.GATE_WAIT, 1, role // 8, role, iteration, data=data)


def test_a_wait_that_lasts_is_told_at_once_and_once_for_all_who_wait_beside_it() -> None:
    digest = WaitDigest()
    first = waited(0, 3, 5.0, over=False)
    assert digest.add(first, 0.0) == [first]
    assert [digest.add(waited(role, 3, 5.0, over=False), 0.1) for role in (1, 2)] == [[], []]
    later = waited(2, 3, 15.0, over=False)
    assert digest.add(later, PERIOD_SECONDS) == [later]
    other = waited(1, 4, 5.0, over=False)
    assert digest.add(other, PERIOD_SECONDS + 0.1) == [other]


def test_who_watches_hears_of_every_event_and_the_report_of_all_seconds(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    files = RunFiles(run, info(), 1, ReportedProgress())
    for role in range(4):
        sealed = Event(Kind.SEALED, 1, 0, role, 1, data={"lineage": 1})
        for event in (sealed, committed(role, 1), waited(role, 1, 1.0 + role)):
            files.write(event)
    files.close(10.0)
    commits, waits = read_events(run.events)
    assert (commits.role, commits.data["roles"], commits.data["bytes"]) == (None, 4, 4000)
    story = Story()
    for event in (waited(3, 1, 3.0, over=False), waits):
        story.take(event)
    assert story.gate_waits == {(1, 1): 10.0}
    assert story.longest_wait == (4.0, 3, 1)
