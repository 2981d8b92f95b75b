"""Spares and goodput against seeded simulations, and their limits."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.planning.assess import assess
from deadpool_megatron.planning.spares import (
    at_most_away,
    away_fraction,
    no_spare_probability,
    spares_needed,
    useful_fraction,
)
from tests.planning.plans import make


@given(st.integers(1, 60), st.integers(0, 60), st.floats(1e-6, 0.6))
def test_the_law_is_binomial(nodes: int, most: int, fraction: float) -> None:
    expected = sum(
        math.comb(nodes, away) * fraction**away * (1 - fraction) ** (nodes - away)
        for away in range(min(most, nodes) + 1)
    )
    assert at_most_away(nodes, most, fraction) == pytest.approx(expected, rel=1e-9)
    assert away_fraction(100.0, 6.0) == pytest.approx(6 / 106), "of the time between repairs"


def test_without_spares_each_loss_waits() -> None:
    assert no_spare_probability(8, 0, 0.01) == 1
    assert 0 < no_spare_probability(8, 2, 0.01) < no_spare_probability(8, 1, 0.01) < 1


def simulate_useful(rate: float, segment: float, overhead: float, cost: float) -> float:
    generator = random.Random(1)
    now, done = 0.0, 0
    while done < 20_000:
        failure = generator.expovariate(rate)
        if failure < segment + overhead:
            now += failure + cost
        else:
            now += segment + overhead
            done += 1
    return done * segment / now


@pytest.mark.parametrize("cost", [0.0, 0.5])
@pytest.mark.parametrize("rate", [0.01, 0.3, 1.5])
def test_goodput_against_a_simulation(rate: float, cost: float) -> None:
    found = useful_fraction(rate, 1.0, 0.1, cost)
    assert found == pytest.approx(simulate_useful(rate, 1.0, 0.1, cost), rel=0.03)


RATES = st.floats(1e-9, 1.0)


@given(RATES, st.floats(0.1, 1e4), st.floats(0, 100), st.floats(0, 1e4), st.floats(1, 10))
def test_goodput_is_a_share_and_falls_with_every_cost(
    rate: float, segment: float, overhead: float, cost: float, factor: float
) -> None:
    found = useful_fraction(rate, segment, overhead, cost)
    assert 0 <= found <= 1 + 1e-12
    assert useful_fraction(rate * factor, segment, overhead, cost) <= found + 1e-12
    assert useful_fraction(rate, segment, overhead, cost * factor) <= found + 1e-12
    assert useful_fraction(rate, segment, overhead * factor, cost) <= found + 1e-12


@given(st.integers(1, 200), st.floats(1e-5, 0.2), st.floats(0.5, 1), st.floats(0.1, 0.999))
def test_the_fewest_spares_are_enough_and_one_less_is_not(
    nodes: int, fraction: float, useful: float, goal: float
) -> None:
    found = spares_needed(nodes, fraction, useful, goal)
    if found is None:
        assert useful < goal or at_most_away(2 * nodes, nodes, fraction) * useful < goal
        return
    assert at_most_away(nodes + found, found, fraction) * useful >= goal
    if found:
        assert at_most_away(nodes + found - 1, found - 1, fraction) * useful < goal


def test_a_repair_that_takes_for_ever_leaves_no_time_to_train() -> None:
    found = assess(make(faults={"node_mtbf_hours": 1, "repair_hours": 1e18}))
    assert found.goodput.hot_swap == 0
    assert not found.reaches_goal
