"""The share of node hours that train, held against a count of every case."""

from itertools import product

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.planning.availability import training_share

UP = st.floats(0.01, 0.99)


@given(st.sets(st.integers(1, 4), min_size=1), st.integers(1, 2), st.integers(0, 2), UP)
def test_share_is_the_mean_over_all_cases(numbers, each, spares, up):
    replicas = sorted(numbers)
    nodes = replicas[-1] * each
    mean = 0.0
    for case in product((0, 1), repeat=nodes + spares):
        fitting = [number for number in replicas if number * each <= sum(case)]
        chance = up ** sum(case) * (1 - up) ** (len(case) - sum(case))
        mean += chance * max(fitting, default=0) * each / len(case)
    assert training_share(replicas, nodes, spares, up) == pytest.approx(mean)


def test_share_of_large_runs_is_finite():
    assert 0.9 < training_share((1, 2), 16_384, 200, 0.995) < 1.0
