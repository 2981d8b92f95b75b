"""The account in the result of a run is that of its report, whoever coordinated it before."""

from __future__ import annotations

from pathlib import Path

from deadpool_megatron.cli.show.story import Story
from deadpool_megatron.cluster.coordinator.reporting.live_account import LiveAccount
from deadpool_megatron.events import Event, EventLog, Kind, take_events, term_file, to_line


def history() -> list[Event]:
    joined = [
        Event(Kind.NODE_JOINED, 0, n, data={"spare": n == 2}, wall_seconds=0.0) for n in range(3)
    ]
    opened = Event(Kind.EPOCH_OPENED, 1, data={"phases": {}}, wall_seconds=10.0)
    steps = [Event(Kind.STEP, 1, iteration=k, wall_seconds=10.0 + k / 7) for k in range(1, 900)]
    ended = Event(Kind.RUN_ENDED, 1, data={"exit_status": 0}, wall_seconds=200.0)
    return [*joined, opened, *steps, ended]


def test_it_is_that_of_the_report_after_a_takeover(tmp_path: Path) -> None:
    path, events = tmp_path / "events.jsonl", history()
    for term, part in ((1, events[:450]), (2, events[450:])):
        log = EventLog(path, term)
        live = LiveAccount(path, term)
        for event in part:
            log.append(to_line(event))
            live.add(event)
        log.close()
    live.finish(20.0)
    story = Story()
    take_events(path, story.add)
    found = {use.value: seconds for use, seconds in story.account.seconds().items()}
    assert live.to_dict() == {"goodput": story.account.goodput(), "node_seconds": found}
    assert found["training"] > 0


def test_without_earlier_terms_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    term_file(path, 1).mkdir()  # cannot be read
    live = LiveAccount(path, 2)
    live.finish(0.1)
    assert live.to_dict() == {"goodput": None, "node_seconds": None}
