"""How far a run is, in the words of whoever waits for it."""

from __future__ import annotations

import pytest

from deadpool_megatron.cli.show.progress import Progress
from deadpool_megatron.cluster.coordinator.reporting.accounting import Account
from deadpool_megatron.events import Event, Kind


def fed(*events: Event) -> Progress:
    account = Account()
    progress = Progress(account)
    for event in events:
        account.add(event)
        progress.add(event)
    return progress


def step(iteration: int, at: float) -> Event:
    return Event(
        Kind.STEP, 1, iteration=iteration, wall_seconds=at, data={"samples": 8 * iteration}
    )


JOINED = Event(Kind.NODE_JOINED, 0, 0, data={"spare": False}, wall_seconds=0.0)
OPENED = Event(Kind.EPOCH_OPENED, 1, data={"phases": {}}, wall_seconds=10.0)
PLAN = Event(Kind.TRAINING, 1, data={"iterations": 1000, "sequence_length": 4096})


def test_speed_goodput_and_time_left() -> None:
    progress = fed(JOINED, OPENED, PLAN, *(step(k, 10.0 + 2.0 * k) for k in range(1, 101)))
    found = progress.to_dict()
    assert found == {
        "iterations": 1000,
        "samples_per_second": 4.0,
        "tokens_per_second": 4.0 * 4096,
        "seconds_left": 1800.0,
    }
    said = "of 1000, 4 samples/s, 16.4k tokens/s, goodput 95.2 %, 30.0 min left"
    assert progress.words(210.0) == said


def test_a_recovery_and_what_is_told_twice_are_no_training() -> None:
    closed = Event(Kind.EPOCH_CLOSED, 1, data={"kind": "node-lost"}, wall_seconds=21.0)
    before = [step(k, 10.0 + 2.0 * k) for k in range(1, 6)]
    progress = fed(JOINED, OPENED, *before, closed, step(5, 100.0))
    assert progress.to_dict()["samples_per_second"] is None
    progress = fed(JOINED, OPENED, *before, closed, step(6, 100.0), step(7, 104.0))
    assert progress.to_dict()["samples_per_second"] == pytest.approx(2.0)


def test_what_is_not_known_is_not_said() -> None:
    assert fed().words(0.0) == ""
    loop = [Event(Kind.STEP, 1, iteration=k, wall_seconds=float(k)) for k in (1, 2)]
    assert set(fed(*loop).to_dict().values()) == {None}


def test_a_step_that_is_heard_of_late_and_thrown_away_has_no_part_in_the_speed() -> None:
    """Between the close and the decision what was reported before comes in."""
    closed = Event(Kind.EPOCH_CLOSED, 1, data={"kind": "nonfinite-loss"}, wall_seconds=30.0)
    decided = Event(Kind.EPOCH_DECIDED, 2, data={"forgotten_from": 8}, wall_seconds=32.0)
    again = [step(k, 34.0 + 2.0 * k) for k in (8, 9, 10)]
    found = fed(PLAN, step(9, 28.0), closed, step(10, 31.0), decided, *again).to_dict()
    assert found["samples_per_second"] == 4.0
    assert found["seconds_left"] == 1980.0
