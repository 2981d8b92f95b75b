"""The account of a run, whatever happens: each second of each node belongs to one use."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe.account import Account, Use

KINDS = st.sampled_from(
    [
        *(Kind.STEP, Kind.EPOCH_CLOSED, Kind.EPOCH_DECIDED, Kind.EPOCH_OPENED, Kind.RECOVERED),
        *(Kind.SEGMENT, Kind.NODE_LOST, Kind.COORDINATOR, Kind.WAITING_FOR_SPARE),
    ]
)
PHASES = {"close": 1.0, "decide": 0.5, "rebuild": 2.0, "restore": 1.0, "sync": 0.5, "verify": 1.0}
DATA = {"kind": "node-lost", "phases": PHASES, "boundary": "save"}


@given(st.lists(st.tuples(KINDS, st.floats(0.0, 50.0)), max_size=40))
def test_nothing_is_counted_twice_or_forgotten(story):
    """Whatever the order of events: the sum is the time, and what is settled only grows."""
    found, now, there, left = Account(), 10.0, {0, 1, 2, 3}, 0.0
    for node in there:
        found.take(Event(Kind.NODE_JOINED, 0, node, data={"spare": node == 3}, wall_seconds=0.0))
    found.take(Event(Kind.EPOCH_OPENED, 1, data={"phases": {}}, wall_seconds=now))
    before = dict(found.seconds)
    for kind, later in story:
        now += later
        where: dict[str, Any] = {"iteration": 1} if kind is Kind.STEP else {}
        if kind is Kind.NODE_LOST and there:
            where["node"] = there.pop()
            left += now
        found.take(Event(kind, data=DATA, wall_seconds=now, **where))
        assert sum(found.uses(now).values()) == pytest.approx(left + now * len(there))
        after = dict(found.seconds)
        assert all(after[use] >= before[use] for use in Use)
        before = after
