"""The story of a run: steps, failures, waits and the pace, whatever order their events come in."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import events
from deadpool_megatron.events import DAMAGE, Event, EventLog, EventTail, Kind, to_line
from tests.common.synthetic_run import events_of, story_of, struck_events


def at(found: Iterable[Event], kind: Kind) -> int:
    return next(number for number, event in enumerate(found) if event.kind is kind)


def step(iteration: int, at: float = 0.0, **data: Any) -> Event:
    values = {"samples": 8 * iteration, **data}
    return Event(Kind.STEP, 1, iteration=iteration, wall_seconds=at, data=values)


def closed(at: float, kind: str = "node-lost") -> Event:
    return Event(Kind.EPOCH_CLOSED, 1, data={"kind": kind, "cause": "x"}, wall_seconds=at)


@pytest.mark.parametrize(
    ("iteration", "data"), [(2, {"samples": "many"}), (2, {"loss": "0x1p99999"}), (2, {"loss": 3})]
)
def test_a_damaged_step_leaves_nothing_behind(iteration: int, data: dict[str, Any]) -> None:
    story = story_of(step(1, loss=(1.0).hex()))
    with pytest.raises(DAMAGE):
        story.take(step(iteration, **data))
    story.take(step(3, loss=(3.0).hex()))
    assert [(one.iteration, one.loss) for one in story.steps] == [
        (1, "0x1.0000000000000p+0"),
        (3, (3.0).hex()),
    ]
    assert story.last_iteration == 3


def test_what_comes_late_or_is_thrown_away_finds_its_place() -> None:
    told = [step(k, loss=loss.hex()) for k, loss in ((1, 1.0), (3, 3.0), (2, 2.0), (3, 9.0))]
    story = story_of(*told, Event(Kind.EVALUATION, 1, iteration=3, data={"loss": "0x1p+0"}))
    assert [one.loss for one in story.steps] == [n.hex() for n in (1.0, 2.0, 3.0)]
    story.take(Event(Kind.EPOCH_DECIDED, 2, data={"forgotten_from": 3}))
    assert (story.last_iteration, len(story.steps), story.evaluations) == (2, 2, {})


PLAN = Event(Kind.TRAINING, 1, data={"iterations": 1000, "sequence_length": 4096})


def test_the_pace_is_that_of_the_newest_steps_behind_a_recovery() -> None:
    before = [step(k, 2.0 * k) for k in range(1, 6)]
    told = story_of(PLAN, *before).progress()
    assert told == {
        "iterations": 1000,
        "samples_per_second": 4.0,
        "tokens_per_second": 4.0 * 4096,
        "seconds_left": 1990.0,
    }
    struck = story_of(PLAN, *before, closed(21.0), step(6, 100.0))
    assert struck.progress()["samples_per_second"] is None
    assert story_of(step(7, 104.0), story=struck).progress()["samples_per_second"] == 2.0
    assert set(story_of(Event(Kind.STEP, 1, iteration=1)).progress().values()) == {None}


def test_step_times_leave_out_the_struck_step() -> None:
    found = story_of(*struck_events()).step_seconds()
    assert len(found) == 8
    assert max(found) < 0.41


def test_a_failure_during_a_recovery_is_the_same_failure() -> None:
    found = struck_events()
    opened = at(found, Kind.EPOCH_OPENED)
    lost = Event(Kind.MEMBER_LOST, 2, 3, 6, data={"slot": 0, "signal": 9})
    again = Event(Kind.EPOCH_CLOSED, 2, data={"cause": "node 3 slot 0 lost"})
    (failure,) = story_of(*found[:opened], lost, again, *found[opened:]).failures
    assert (failure.closes, failure.is_over) == (2, True)
    assert [loss.node for loss in failure.losses] == [0, 3]


def test_a_run_that_is_started_again_has_not_ended() -> None:
    """It ended with its state in memory, was started again, and has lost a node since."""
    joined = Event(Kind.NODE_JOINED, 1, 0, data={"spare": False}, wall_seconds=1100.0)
    lost = Event(Kind.NODE_LOST, 1, 0, data={"cause": "gone"}, wall_seconds=1101.0)
    ended = story_of(*events_of(3, None, 0.0, began=1000.0))
    assert ended.exit_status == 0
    story = story_of(joined, lost, closed(1101.0), story=ended)
    assert [loss.node for loss in story.failures[0].losses] == [0]
    assert (story.exit_status, story.started_at) == (None, 1100.0)


def test_a_recovery_of_which_nobody_tells_the_end_is_over_all_the_same() -> None:
    """Its coordinator was lost behind the opening, and the next one knows of no recovery."""
    told = [e for e in struck_events() if e.kind not in (Kind.RECOVERED, Kind.RUN_ENDED)]
    story = story_of(*told)
    assert story.current is None
    (failure,) = story.failures
    assert failure.seconds == pytest.approx(0.899, abs=0.02)  # but for the detection
    assert failure.steps_recomputed == 0
    story.take(closed(1100.0))
    assert [one.closes for one in story.failures] == [1, 1]


def replaced(term: int, node: int, at: float) -> Event:
    return Event(Kind.COORDINATOR, 1, node, data={"term": term}, wall_seconds=at)


REOPENED = Event(Kind.EPOCH_OPENED, 1, data={"phases": {}}, wall_seconds=13.0)


def test_the_loss_of_a_coordinator_that_interrupts_nothing_is_a_failure_without_cost() -> None:
    found = story_of(replaced(1, 2, 0.0), step(1, 10.0), replaced(2, 1, 12.0), REOPENED)
    (lost,) = found.failures
    assert (lost.kind, lost.best.node, lost.began) == ("coordinator", 2, 10.0)
    assert (lost.is_over, lost.seconds, lost.steps_recomputed) == (True, 0.0, 0)
    assert found.current is None
    values = {"kind": "node-lost", "seconds": 4.0, "steps_recomputed": 1, "phases": {"detect": 0.5}}
    recovered = Event(Kind.RECOVERED, 2, data=values, wall_seconds=30.0)
    (one,) = story_of(
        replaced(1, 2, 0.0), step(1, 10.0), replaced(2, 1, 12.0), closed(26.0), recovered
    ).failures
    assert (one.kind, one.began, one.seconds) == ("node-lost", 10.0, 20.0)
    assert one.phases == {"detect": 16.5}, "nobody coordinated meanwhile"


def test_what_somebody_asked_for_is_no_failure_and_has_numbers_of_its_own() -> None:
    over = Event(Kind.RECOVERED, 2, data={"seconds": 1.0, "phases": {}}, wall_seconds=9.0)
    kinds = ("drained", "node-lost", "restart", "process-crash")
    story = story_of(*(event for kind in kinds for event in (closed(8.0, kind), over)))
    numbers = [(one.planned, one.number) for one in story.failures]
    assert numbers == [(True, 1), (False, 1), (True, 2), (False, 2)]
    assert story.survived == 2


def test_a_recovery_that_the_end_overtook_is_not_the_one_of_the_next_start() -> None:
    waits = Event(Kind.WAITING_FOR_SPARE, 1, data={"text": "x", "limit_seconds": 9.0})
    ended = Event(Kind.RUN_ENDED, 1, data={"exit_status": 130}, wall_seconds=6.0)
    story = story_of(closed(5.0), waits)
    assert story.waiting is waits
    story_of(ended, story=story)
    assert (story.current, story.waiting) == (None, None)
    assert story.failures[0].is_cut_short
    joined = Event(Kind.NODE_JOINED, 1, 0, data={"spare": False}, wall_seconds=90.0)
    story_of(replaced(2, 1, 89.0), joined, closed(91.0, "restart"), story=story)
    assert [one.kind for one in story.failures] == ["node-lost", "restart"]
    assert story.failures[1].began == 91.0


def test_files_longer_than_a_piece_are_followed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be a little longer than a piece; and one look takes no more than a piece."""
    monkeypatch.setattr(events, "_PIECE_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    log = EventLog(path, part_bytes=1000)
    for iteration in range(1, 101):
        log.append(to_line(replace(step(iteration), data={})))
    log.close()
    tail, found = EventTail(path), list[list[int | None]]()
    while read := tail.poll():
        found.append([event.iteration for event in read])
    assert [k for piece in found for k in piece] == list(range(1, 101))
    assert max(map(len, found)) < 20
    with open(path.with_name("events-0002.jsonl"), "ab") as file:  # in the middle of a line
        file.write(to_line(step(101))[:-9])
        file.flush()
        assert tail.poll() == []
        file.write(to_line(step(101))[-9:])
    assert [event.iteration for event in tail.poll()] == [101]


def test_a_lost_node_is_an_exposure_at_least_until_the_decision() -> None:
    """Also where no vault reports one: a wait for a spare is a part of it."""
    found = [e for e in struck_events() if e.kind is not Kind.EXPOSED]
    decided = at(found, Kind.EPOCH_DECIDED)
    late = [replace(e, wall_seconds=e.wall_seconds + 26.0) for e in found[decided:]]
    (failure,) = story_of(*found[:decided], *late).failures
    assert failure.exposed_seconds == pytest.approx(26.0, abs=0.2)
