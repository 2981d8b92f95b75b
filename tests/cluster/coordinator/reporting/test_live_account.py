"""The account that a coordinator keeps: that of the report, whoever coordinated before."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.reporting import live_account
from deadpool_megatron.cluster.coordinator.reporting.live_account import LiveAccount
from deadpool_megatron.events import Event, EventTail, Kind, term_file, to_line
from deadpool_megatron.observe.story import Story
from tests.common.waiting import wait_for

NOTHING = {"goodput": None, "node_seconds": None}


def history() -> list[Event]:
    joined = [
        Event(Kind.NODE_JOINED, 0, n, data={"spare": n == 2}, wall_seconds=0.0) for n in range(3)
    ]
    opened = Event(Kind.EPOCH_OPENED, 1, data={"phases": {}}, wall_seconds=10.0)
    steps = [Event(Kind.STEP, 1, iteration=k, wall_seconds=10.0 + k / 7) for k in range(1, 900)]
    lost = Event(Kind.NODE_LOST, 1, 1, wall_seconds=139.0)
    closed = Event(Kind.EPOCH_CLOSED, 1, data={"kind": "node-lost"}, wall_seconds=139.5)
    phases = {"phases": {"close": 0.5, "restore": 2.0}}
    again = Event(Kind.EPOCH_OPENED, 2, data=phases, wall_seconds=143.0)
    seats = {"steps_recomputed": 1, "seats_changed": {"1": [[1, 0, 0], [2, 0, 0]]}}
    recovered = Event(Kind.RECOVERED, 2, data=seats, wall_seconds=145.0)
    more = [Event(Kind.STEP, 2, iteration=k, wall_seconds=k / 6) for k in range(900, 1000)]
    ended = Event(Kind.RUN_ENDED, 2, data={"exit_status": 0}, wall_seconds=200.0)
    return [*joined, opened, *steps, lost, closed, again, recovered, *more, ended]


def live_through(path: Path, term: int, events: Sequence[Event], kept_at: int) -> LiveAccount:
    """The coordinator of a term, which keeps its account once, behind so many of its events."""
    live, nbytes = LiveAccount(path, term), 0
    live.finish(20.0)
    with open(term_file(path, term), "wb") as file:
        for number, event in enumerate(events, 1):
            nbytes += file.write(to_line(event))
            live.add(event)
            if number == kept_at:
                live.keep(nbytes, at_once=True)
                wait_until_kept(path.with_name("account.json"), {"term": term, "nbytes": nbytes})
    return live


def wait_until_kept(kept: Path, place: dict[str, int]) -> None:
    wait_for(
        "it to be kept", lambda: kept.exists() and json.loads(kept.read_text())["place"] == place
    )


def report(path: Path) -> dict[str, Any]:
    story = Story()
    EventTail(path).feed(story.take)
    found = {use.value: seconds for use, seconds in story.account.uses().items()}
    assert found["training"] > 0
    return {"goodput": story.account.goodput(), "node_seconds": found}


@pytest.mark.parametrize("where", [450, 904, 905, 906])
@pytest.mark.parametrize("kept_at", [1, 300, 450])
def test_it_is_that_of_the_report_after_a_takeover(
    tmp_path: Path, where: int, kept_at: int
) -> None:
    """Also where that comes in the middle of a recovery."""
    path, events = tmp_path / "events.jsonl", history()
    live_through(path, 1, events[:where], kept_at)
    live = live_through(path, 2, events[where:], 0)
    assert live.to_dict() == report(path)


def test_it_is_that_of_the_report_without_an_account_of_a_short_past(tmp_path: Path) -> None:
    path, events = tmp_path / "events.jsonl", history()
    (tmp_path / "account.json").write_text('{"place": {"term": 1, "nbytes": 70}, "account": {}}')
    live_through(path, 1, events[:450], 0)
    assert live_through(path, 2, events[450:], 0).to_dict() == report(path)


@pytest.mark.usefixtures("pipes_hang")
def test_what_its_account_goes_up_to_is_not_opened(tmp_path: Path) -> None:
    path, events = tmp_path / "events.jsonl", history()
    live_through(path, 1, events[:450], 450)
    live_through(path, 2, events[450:700], 200)
    aside = path.with_suffix(".aside")
    path.rename(aside)
    os.mkfifo(path)  # who opens it waits for ever
    live = live_through(path, 3, events[700:], 0)
    path.unlink()
    aside.rename(path)
    assert live.to_dict() == report(path)


def test_a_long_past_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with open(path, "wb") as file:
        file.truncate(live_account._MOST_BYTES + 1)
    live = live_through(path, 2, history(), 0)
    live.keep(1, at_once=True)
    live.close(20.0)
    assert live.to_dict() == NOTHING
    assert not (tmp_path / "account.json").exists(), "an older one may be complete"


def test_without_earlier_terms_there_is_none_and_nothing_is_kept_for_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    term_file(path, 1).mkdir()  # cannot be read
    live = live_through(path, 2, history(), 0)
    assert live.to_dict() == NOTHING
    assert live._waiting is None


@pytest.mark.usefixtures("pipes_hang")
def test_a_directory_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_account, "_MOST_WAITING", 10)
    path = tmp_path / "events.jsonl"
    os.mkfifo(tmp_path / "account.json")
    live = LiveAccount(path, 2)
    for event in history()[:10]:
        live.add(event)
    live.finish(0.01)
    assert live.to_dict() == NOTHING
    assert live._waiting is not None
    live.add(history()[10])
    assert live._waiting is None, "too many: they are let go"
    live.keep(1, at_once=True)
    live.close(0.01)
    (tmp_path / "account.json").write_text("{}")  # it may go on
    live.close(20.0)
    assert live.to_dict() == NOTHING


def test_one_that_was_superseded_keeps_nothing(tmp_path: Path) -> None:
    live = live_through(tmp_path / "events.jsonl", 1, history()[:9], 0)
    live.hand_over()
    live.keep(1, at_once=True)
    live.close(20.0)
    assert not (tmp_path / "account.json").exists()
