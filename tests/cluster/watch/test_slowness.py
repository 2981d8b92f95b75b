"""Verdicts from random measurements; each rule is in calls/windows.txt."""

import random

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.cluster.watch import windows

STEPS = st.floats(0.01, 30.0)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [None, 5])
def test_slowness_watch_names_only_the_slow_node_in_an_hour_of_noise(slow):
    """Sixteen nodes with iterations of half a second. Every hundredth of each node has a pause,
    mostly of a whole iteration, now and then of fifty.
    """
    noise, roles = random.Random(1), range(16)
    watch, totals = windows.SlownessWatch(), [0.0 for _ in roles]
    named: dict[int, int] = {}
    for iteration in range(7200):
        compared = {
            r: windows.ComparedRole(r, (*roles,), windows.OwnTime(iteration, totals[r]))
            for r in roles
        }
        for verdict in watch.look(1, compared):
            named.setdefault(verdict.node, iteration)
        for role in roles:
            usual = noise.lognormvariate(0.0, 0.1) * (1.5 if role == slow else 1.0)
            pause = min(50.0, noise.paretovariate(1.2)) if noise.random() < 0.01 else 0.0
            totals[role] += 0.5 * (usual + pause)
    assert named == ({} if slow is None else {slow: windows.WINDOWS * windows.WINDOW_ITERATIONS})


def seen(every: int, step: float, commit: float, fit: bool = True) -> windows.Stretch:
    """A long stretch in which copies take ``commit`` seconds and a step without waits ``step``."""
    iterations = every * max(windows.MIN_ITERATIONS, int(windows.MIN_SECONDS / step) + 1)
    stall = max(0.0, commit - every * step) * iterations / every
    window = every * step if fit else 0.0
    return windows.Stretch(iterations, iterations * step + stall, stall, commit * fit, window)


@given(STEPS, st.floats(0.01, 200.0), st.integers(1, 20), st.booleans())
def test_next_cadence_fits_when_training_waited(step, commit, every, fit):
    stretch = seen(every, step, commit, fit)
    found = windows.next_cadence(every, stretch, 0)
    if stretch.share <= 0.05:
        assert found == every
    elif found < 1000:
        assert found > every
        assert found * step >= commit
        assert seen(found, step, commit).share == 0
        assert (found - 1) * step <= 1.1 * commit + step or found == every + 1


@given(STEPS, st.floats(0.01, 200.0), st.integers(1, 30))
def test_next_cadence_settles(step, commit, every):
    """Up and down with the same facts: no second change leads back."""
    first = windows.next_cadence(every, seen(every, step, commit), windows.CALM_STRETCHES)
    again = windows.next_cadence(first, seen(first, step, commit), windows.CALM_STRETCHES)
    assert (again - first) * (first - every) >= 0 or again == first
    last = windows.next_cadence(again, seen(again, step, commit), windows.CALM_STRETCHES)
    assert last == again
