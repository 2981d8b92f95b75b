"""Which iterations are audited: as many as asked for, where the state before is captured."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.hooks.audit.audit import audit_number, is_audited
from deadpool_megatron.layout.cadence import is_due


def test_every_so_many_iterations() -> None:
    assert [k for k in range(1, 13) if is_audited(k, 4, 1)] == [4, 8, 12]
    assert [k for k in range(1, 5) if is_audited(k, 1, 1)] == [1, 2, 3, 4]
    assert [k for k in range(1, 20) if is_audited(k, 6, 4)] == [9, 13]


@given(st.integers(1, 50), st.integers(1, 20))
def test_one_in_each_interval_that_has_a_captured_state(interval: int, every: int) -> None:
    audited = [k for k in range(1, 1000) if is_audited(k, interval, every)]
    assert all(is_due(k - 1, every) for k in audited)
    reached = {k // interval for k in audited}
    wanted = {k // interval for k in range(interval, 1000 - interval - every)}
    assert len(reached) == len(audited), "once in each interval"
    if every <= interval:
        assert wanted <= reached


@given(st.integers(1, 50), st.integers(1, 20))
def test_roles_take_turns_none_is_left_out(interval: int, every: int) -> None:
    audited = [k for k in range(1, 1000) if is_audited(k, interval, every)]
    numbers = [audit_number(k, interval, every) for k in audited]
    assert [later - one for one, later in pairwise(numbers)] == [1] * (len(numbers) - 1)
