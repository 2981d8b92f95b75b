"""The newest record holds all that a successor knows."""

from __future__ import annotations

import json

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.machine import _TOPICS
from deadpool_megatron.layout.history import NO_LIMIT, History
from tests.cluster.machine.rig import Rig


def test_each_input_has_a_topic() -> None:
    found, kinds = {ev.Input}, set()
    while found:
        kind = found.pop()
        found.update(kind.__subclasses__())
        if not kind.__subclasses__():
            kinds.add(kind)
    assert kinds - {ev.Tick} == _TOPICS.keys()


def test_a_node_that_is_given_up_between_two_records_is_noted() -> None:
    rig = Rig(nodes=2, spares=1).run()
    rig.feed(ev.NodeLost(2, "connection closed"))
    note = rig.one(act.RecordRemoved)
    assert not rig.of(act.CloseEpoch), "nobody needs the spare: no record follows"
    state = rig.take_over(rig.record, gone={note.node: note.cause})
    assert not state.fleet.absent({2}), "it is not waited for"


def test_agents_that_leave_at_the_end_are_not_noted() -> None:
    rig = Rig().run()
    rig.feed(ev.UserStop())
    rig.feed(ev.NodeLost(0, "connection closed"))
    assert not rig.of(act.RecordRemoved)


def test_what_grows_with_the_run_is_cut() -> None:
    lines = {lineage: lineage for lineage in range(1, 5001)}
    history = History(
        kept={**lines, 5001: NO_LIMIT},
        gone=dict.fromkeys((n for n in range(100_000) if n % 10_000), "x" * 100_000),
        nonfinite=dict.fromkeys(range(100_000), 1),
    )
    text = json.dumps(history.to_dict())
    assert len(text) < 60_000
    found = History.from_dict(json.loads(text))
    assert max(found.kept) == 5001
    assert max(found.nonfinite) == 99_999
    assert set(found.gone) == set(history.gone), "none of them may come back"
