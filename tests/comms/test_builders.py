"""Groups connect side by side, in every process as many at once as it likes."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.comms.in_flight.waiters import Builders, Job

_ROLES = 4
_DEADLINE_SECONDS = 20.0
_GROUPS = st.lists(
    st.lists(st.integers(0, _ROLES - 1), min_size=2, max_size=_ROLES, unique=True).map(sorted),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(_GROUPS, st.lists(st.integers(1, 3), min_size=_ROLES, max_size=_ROLES))
def test_no_circle_of_waits(groups: list[list[int]], at_once: list[int]) -> None:
    """Each role connects its groups in the common order; a group is up when all have come."""
    gates = [threading.Barrier(len(group)) for group in groups]
    times = [0] * len(groups)

    def connect(number: int) -> None:
        if gates[number].wait(_DEADLINE_SECONDS) == 0:
            times[number] += 1

    def play(role: int) -> None:
        jobs = [
            Job(str(number), partial(connect, number))
            for number, group in enumerate(groups)
            if role in group
        ]
        builders = Builders(jobs, at_once[role])
        builders.run()
        ended.append(builders.oldest)

    ended: list[str] = []
    roles = [threading.Thread(target=play, args=(role,), daemon=True) for role in range(_ROLES)]
    for role in roles:
        role.start()
    for role in roles:
        role.join(2 * _DEADLINE_SECONDS)
    assert ended == [""] * _ROLES, "a role waits for ever"
    assert times == [1] * len(groups), "every group comes up once"


def test_an_error_begins_no_further_group_and_leaves_none_hanging_unnoticed() -> None:
    hangs, fails = threading.Event(), threading.Event()
    begun = []

    def hang() -> None:
        fails.set()
        assert hangs.wait(_DEADLINE_SECONDS)

    def fail() -> None:
        assert fails.wait(_DEADLINE_SECONDS)
        raise RuntimeError("the peer is gone")

    third = Job("third", lambda: begun.append("third"))
    builders = Builders([Job("first", hang), Job("second", fail), third], 2)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        builders.run()
    assert builders.oldest == "first"
    assert not builders.finished
    hangs.set()
    for thread in threading.enumerate():
        if thread.name == "deadpool-builder":
            thread.join(_DEADLINE_SECONDS)
    assert builders.finished
    assert not begun
