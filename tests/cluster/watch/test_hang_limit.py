"""How soon a hang is one, from what the steps of the run have taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from deadpool_megatron.cluster.watch.hang import STEP, ProgressClock, RoleStatus, find_hang
from deadpool_megatron.cluster.watch.hang_limit import HangLimit
from deadpool_megatron.settings import Settings

SETTINGS = Settings()
LOOK_SECONDS = 2.0


def at(iteration: int, *sections: str) -> dict[int, RoleStatus]:
    names = sections or ("step", "step")
    return {
        role: RoleStatus(name, iteration, None, iteration, 0.0) for role, name in enumerate(names)
    }


def after_steps(limit: HangLimit, seconds: float, steps: int, now: float = 0.0) -> float:
    for iteration in range(1, steps + 2):
        limit.look(at(iteration), now)
        now += seconds
    return now


def beats(
    step_seconds: float, stuck_from: int
) -> Iterator[tuple[float, dict[int, dict[str, object]]]]:
    """What two roles say at each look; from an iteration on they say the same."""
    now = 0.0
    while True:
        iteration = min(int(now / step_seconds), stuck_from)
        beat = {"section": "step", "iteration": iteration, "progress": 9 * iteration}
        yield (
            now,
            {0: {**beat, "waiting": ["dp", "all_reduce", iteration]}, 1: {**beat, "waiting": None}},
        )
        now += LOOK_SECONDS


def test_a_hang_is_found_within_three_of_the_longest_steps() -> None:
    clock, limit = ProgressClock(), HangLimit(SETTINGS)
    for now, said in beats(8.0, stuck_from=10):
        statuses = clock.update(said, now)
        limit.look(statuses, now)
        hang = find_hang(statuses, SETTINGS, limit.seconds)
        if hang is not None:
            break
    assert hang.culprits == (1,)
    assert now <= 80.0 + 3 * 8.0


@pytest.mark.parametrize(
    ("step_seconds", "steps", "seconds"),
    [
        pytest.param(8.0, 4, SETTINGS.hang_seconds, id="too few steps were seen"),
        pytest.param(8.0, 6, 20.0, id="known"),
        pytest.param(0.3, 100, 20.0, id="fast steps, and storage that is busy for a moment"),
        pytest.param(200.0, 9, SETTINGS.hang_seconds, id="never more than the user's"),
    ],
)
def test_the_limit_in_force(step_seconds: float, steps: int, seconds: float) -> None:
    limit = HangLimit(SETTINGS)
    after_steps(limit, step_seconds, steps)
    assert limit.seconds == seconds


def test_a_lost_node_and_a_slow_gate_are_noticed_before_a_hang_would_be() -> None:
    limit = HangLimit(Settings(node_silence_seconds=30.0, rejoin_seconds=40.0))
    after_steps(limit, 0.3, 100)
    assert limit.seconds == 60.0
    limit = HangLimit(Settings(gate_report_seconds=15.0))
    after_steps(limit, 0.3, 100)
    assert limit.seconds == 30.0


def test_the_longest_step_counts() -> None:
    limit = HangLimit(SETTINGS)
    now = after_steps(limit, 8.0, 9)
    limit.look(at(11), now + 30.0)
    assert limit.seconds == 2.5 * 38.0


@pytest.mark.parametrize("section", ["evaluation", "save", "paused", "gate"])
def test_what_may_take_long_is_no_step(section: str) -> None:
    limit = HangLimit(SETTINGS)
    now = after_steps(limit, 8.0, 9)
    limit.look(at(10, "step", section), now)
    limit.look(at(10, "step", "step"), now + 200.0)
    limit.look(at(11), now + 205.0)
    limit.look(at(12), now + 213.0)
    assert limit.seconds == 20.0


def test_who_waits_for_protection_has_the_users_limit() -> None:
    """The gate waits for another node, or a network that is slow: nobody would be any better."""
    waits = {0: RoleStatus("gate", 7, None, 50, 60.0), 1: RoleStatus(STEP, 7, None, 50, 60.0)}
    assert find_hang(waits, SETTINGS, 20.0) is None
    assert find_hang({role: replace(s, section=STEP) for role, s in waits.items()}, SETTINGS, 20.0)


def test_another_epoch_begins_no_step() -> None:
    limit = HangLimit(SETTINGS)
    now = after_steps(limit, 8.0, 9)
    limit.forget_step()
    limit.look(at(9), now + 60.0)  # it goes back
    limit.look(at(10), now + 100.0)
    assert limit.seconds == 20.0


def test_storage_that_is_busy_for_minutes_does_not_end_a_run_as_a_hang_at_one_step() -> None:
    """The third hang at one step ends it."""
    limit = HangLimit(SETTINGS)
    after_steps(limit, 8.0, 9)
    found = 0.0
    for _ in range(3):
        still = limit.seconds
        found += still
        limit.was_reached(still)
    assert found > 180.0
    assert limit.seconds == SETTINGS.hang_seconds
