"""The chance of a loss against trying every choice; spares and goodput against simulations."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.planning.assess import assess
from deadpool_megatron.planning.risk import (
    HolderSets,
    fatal_domains,
    holder_sets,
    loss_probability,
    losses_per_hour,
    minimal,
)
from deadpool_megatron.planning.roles import Placement, place
from deadpool_megatron.planning.spares import (
    at_most_away,
    away_fraction,
    no_spare_probability,
    spares_needed,
    useful_fraction,
)
from tests.planning.plans import make

NODES = 9
SETS = st.sets(st.frozensets(st.integers(0, NODES - 1), min_size=1, max_size=4), max_size=12)
PLANS = st.fixed_dictionaries(
    {
        "protection": st.fixed_dictionaries({"replicas": st.integers(1, 3)}),
        "parallel": st.sampled_from(
            [
                {"tp": 2, "pp": 2, "dp": 4},
                {"tp": 2, "pp": 1, "dp": 8},
                {"tp": 1, "pp": 4, "dp": 4, "optimizer_instances": 2},
                {"tp": 2, "pp": 2, "dp": 4, "distributed_optimizer": False},
            ]
        ),
        "cluster": st.fixed_dictionaries(
            {
                "racks": st.sampled_from([None, 2, 4, 8]),
                "node_order": st.sampled_from(["by-rack", "across-racks"]),
                "spares": st.integers(0, 2),
            }
        ),
    }
)
RATES = st.floats(1e-9, 1.0)


def tried(sets: HolderSets, nodes: int, lost: int) -> float:
    choices = [set(choice) for choice in itertools.combinations(range(nodes), lost)]
    return sum(any(one <= choice for one in sets) for choice in choices) / len(choices)


@settings(max_examples=300)
@given(sets=SETS, lost=st.integers(1, 3))
def test_counting_is_the_same_as_trying_all(sets: set[frozenset[int]], lost: int) -> None:
    found = minimal(sets)
    assert loss_probability(found, NODES, lost) == pytest.approx(
        tried(frozenset(sets), NODES, lost)
    )
    assert all(not a < b for a in found for b in found)


def state_is_lost(placement: Placement, dead: set[int]) -> bool:
    """From the words of the design, role by role: no source is left for some bytes."""
    by_role = {role.role: role for role in placement.roles}
    for role in placement.roles:
        if {role.node, *role.buddies} <= dead:
            return True
        for part in role.parts:
            sources = [by_role[same].node for same in part.replicas]
            if not part.covered:
                sources += [node for same in part.replicas for node in by_role[same].buddies]
            if set(sources) <= dead:
                return True
    return False


@settings(max_examples=60)
@given(values=PLANS, lost=st.integers(1, 3))
def test_the_real_placement_against_enumeration(values: dict[str, Any], lost: int) -> None:
    placement = place(make(**values))
    choices = [set(c) for c in itertools.combinations(range(placement.nodes), lost)]
    bad = sum(state_is_lost(placement, dead) for dead in choices)
    found = loss_probability(holder_sets(placement), placement.nodes, lost)
    assert found == pytest.approx(bad / len(choices))


@settings(max_examples=60)
@given(values=PLANS, lost=st.integers(1, 3))
def test_one_more_copy_never_raises_the_chance(values: dict[str, Any], lost: int) -> None:
    replicas = values["protection"]["replicas"]
    fewer, more = (
        place(make(**{**values, "protection": {"replicas": replicas + extra}})) for extra in (0, 1)
    )
    before = loss_probability(holder_sets(fewer), fewer.nodes, lost)
    assert loss_probability(holder_sets(more), more.nodes, lost) <= before


@settings(max_examples=60)
@given(values=PLANS)
def test_copies_in_other_domains_survive_what_they_are_for(values: dict[str, Any]) -> None:
    placement = place(make(**values))
    sets = holder_sets(placement)
    for lost in range(1, values["protection"]["replicas"] + 1):
        assert loss_probability(sets, placement.nodes, lost) == 0
    if placement.same_domain == 0:
        assert fatal_domains(sets, placement.domains) == ()


def test_a_domain_that_holds_all_copies_is_named() -> None:
    sets = frozenset({frozenset({0, 1}), frozenset({1, 2})})
    assert fatal_domains(sets, {0: "a", 1: "a", 2: "b"}) == ("a",)


def test_more_nodes_lost_than_there_are() -> None:
    assert loss_probability(frozenset({frozenset({0, 1})}), 2, 3) == 1
    assert loss_probability(frozenset(), 2, 3) == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_time_between_losses_against_a_simulation(size: int) -> None:
    """One holder set, nodes that fail as a Poisson process and are whole again after T."""
    generator = random.Random(4711)
    mtbf, exposure, until = 1.0, 0.1, 40_000.0
    failed_at = [-math.inf] * size
    now, losses = 0.0, 0
    while now < until:
        now += generator.expovariate(size / mtbf)
        failed_at[generator.randrange(size)] = now
        losses += all(now - at < exposure for at in failed_at)
    expected = losses_per_hour(frozenset({frozenset(range(size))}), mtbf, exposure) * until
    # Four standard errors; losses come in clusters, which a factor of two covers.
    assert abs(losses - expected) < 4 * math.sqrt(2 * expected)


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
