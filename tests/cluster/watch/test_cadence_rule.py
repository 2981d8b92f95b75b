"""When protection becomes thinner or denser, from what is measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.cluster.watch.cadence_rule import (
    CALM_STRETCHES,
    LEAST_ITERATIONS,
    LEAST_SECONDS,
    Stretch,
    StretchMeter,
    denser_or_thinner,
)

EPOCH = 2
STEPS = st.floats(0.01, 30.0)


def seen(every: int, step: float, commit: float, fit: bool = True) -> Stretch:
    """A long stretch in which copies take ``commit`` seconds and a step without waits ``step``."""
    iterations = every * max(LEAST_ITERATIONS, int(LEAST_SECONDS / step) + 1)
    stall = max(0.0, commit - every * step) * iterations / every
    window = every * step if fit else 0.0
    return Stretch(iterations, iterations * step + stall, stall, commit * fit, window)


@given(STEPS, st.floats(0.01, 200.0), st.integers(1, 20), st.booleans())
def test_what_is_chosen_when_training_waits_has_room(
    step: float, commit: float, every: int, fit: bool
) -> None:
    stretch = seen(every, step, commit, fit)
    found = denser_or_thinner(every, stretch, 0)
    if stretch.share <= 0.05:
        assert found == every
    elif found < 1000:
        assert found > every
        assert found * step >= commit
        assert seen(found, step, commit).share == 0
        assert (found - 1) * step <= 1.1 * commit + step or found == every + 1


@given(STEPS, st.floats(0.01, 200.0), st.integers(1, 30))
def test_it_settles(step: float, commit: float, every: int) -> None:
    """Up and down with the same facts: no second change leads back."""
    first = denser_or_thinner(every, seen(every, step, commit), CALM_STRETCHES)
    again = denser_or_thinner(first, seen(first, step, commit), CALM_STRETCHES)
    assert (again - first) * (first - every) >= 0 or again == first
    last = denser_or_thinner(again, seen(again, step, commit), CALM_STRETCHES)
    assert last == again


def test_it_becomes_denser_only_after_a_long_calm_and_with_figures() -> None:
    stretch = seen(8, 1.0, 2.0)
    assert denser_or_thinner(8, stretch, CALM_STRETCHES - 1) == 8
    assert denser_or_thinner(8, stretch, CALM_STRETCHES) == 4
    assert denser_or_thinner(8, seen(8, 1.0, 2.0, fit=False), CALM_STRETCHES) == 8


@pytest.mark.parametrize(("iterations", "seconds"), [(49, 100.0), (100, 29.0)])
def test_nothing_is_concluded_from_little(iterations: int, seconds: float) -> None:
    assert denser_or_thinner(1, Stretch(iterations, seconds, seconds / 2), 0) == 1


def run(meter: StretchMeter, first: int, count: int, seconds: float, wait: float = 0.0) -> None:
    """Iterations of two roles that wait side by side."""
    for iteration in range(first, first + count):
        meter.waited(EPOCH, iteration - 1, wait)
        meter.waited(EPOCH, iteration - 1, wait / 2)
        meter.shipped(EPOCH, 0, wait, 1.0)
        meter.shipped(EPOCH, 1, wait / 2, 1.0)
        meter.step(EPOCH, iteration, 1000.0 + iteration * seconds)


def test_the_meter_counts_the_longest_wait_of_each_iteration() -> None:
    meter = StretchMeter()
    run(meter, 11, 53, seconds=1.0, wait=0.5)
    stretch = meter.stretch()
    assert (stretch.iterations, stretch.seconds) == (50, 50.0)
    assert stretch.share == pytest.approx(0.5)
    assert stretch.ship_seconds == pytest.approx(0.5)
    assert meter.step_seconds == pytest.approx(1.0)
    assert meter.look(1) == (3, stretch)
    assert meter.stretch().iterations == 0, "the next stretch has begun"


def test_the_first_iterations_of_an_epoch_do_not_count() -> None:
    """They wait for copies of what was restored."""
    meter = StretchMeter()
    meter.step(EPOCH, 20, 100.0)
    meter.waited(EPOCH, 19, 60.0)
    meter.step(EPOCH, 21, 200.0)
    meter.waited(EPOCH, 20, 60.0)
    run(meter, 22, 52, seconds=1.0)
    assert meter.stretch().stall_seconds == 0
    meter.waited(EPOCH - 1, 40, 9.0)
    assert meter.stretch().stall_seconds == 0, "of an epoch that is closed"


def test_a_wait_between_calm_stretches_begins_the_calm_anew() -> None:
    meter = StretchMeter()
    meter.step(EPOCH, 1, 1000.0)
    meter.step(EPOCH, 2, 1000.0)
    begin = 3
    for wait, calm in ((0.0, 1), (0.0, 2), (0.03, 0), (0.0, 1)):
        run(meter, begin, 51, seconds=1.0, wait=wait)
        meter.look(4)
        assert meter.calm == calm
        begin += 51
