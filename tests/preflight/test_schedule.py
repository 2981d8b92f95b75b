"""Which links are measured, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.preflight.judge import Speed, slow_or_unknown
from deadpool_megatron.preflight.schedule import first_pairs, rounds, second_look


@given(st.sets(st.integers(0, 60), max_size=40))
def test_a_node_is_measured_once_in_a_round(nodes: set[int]) -> None:
    pairs = first_pairs(nodes)
    for node in nodes:
        partners = {other for pair in pairs if node in pair for other in pair} - {node}
        assert len(partners) >= min(2, len(nodes) - 1)
    assert sorted(pair for turn in rounds(pairs) for pair in turn) == pairs
    for turn in rounds(pairs):
        assert len({node for pair in turn for node in pair}) == 2 * len(turn)
    assert len(rounds(pairs)) <= 7


def test_doubtful_nodes_get_another_partner() -> None:
    rates = {0: 1e9, 1: 1e9, 2: 1e8, 3: 1e9, 4: None, 5: 1e8}
    speeds = {node: None if rate is None else Speed(1e9, rate) for node, rate in rates.items()}
    doubtful = slow_or_unknown(speeds)
    assert doubtful == (2, 4, 5)
    pairs = second_look(doubtful, rates, [(0, 2), (2, 5), (1, 3)])
    assert pairs == [(2, 1), (4, 1), (5, 3)]
    assert second_look([0, 1], [0, 1], [(0, 1)]) == []
    assert second_look([0, 1, 2], [0, 1, 2], [(0, 1)]) == [(0, 2), (1, 2), (2, 0)]
