"""The newest record holds all that a successor knows."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.machine import _HANDLERS
from deadpool_megatron.cluster.machine.state import LineageProgress
from deadpool_megatron.layout.history import NO_LIMIT, History
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from tests.cluster.machine.rig import Rig, g
from tests.simulated.late import NOT_OF_EPOCH, OF_EPOCH


def kinds_of_input() -> set[type[ev.Input]]:
    found, kinds = {ev.Input}, set()
    while found:
        kind = found.pop()
        found.update(kind.__subclasses__())
        if not kind.__subclasses__():
            kinds.add(kind)
    return kinds


def test_each_input_has_a_topic():
    assert kinds_of_input() - {ev.Tick} == _HANDLERS.keys()


def test_input_with_an_epoch_is_delivered_late_and_early():
    """By the simulated world: see late.py."""
    carry = {
        kind
        for kind in kinds_of_input()
        if kind is ev.NodeInventory or "epoch" in {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    }
    assert carry == OF_EPOCH.keys() | NOT_OF_EPOCH


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from("abc")), max_size=6))
def test_rewritten_checkpoint_counts_once(written):
    """A path has one checkpoint, the last."""
    line, last = LineageProgress(), dict[str, int]()
    for k, path in written:
        line.add_valid(Restore("durable", Generation(1, k), "save", path))
        last[path] = k
    assert {restore.path: restore.generation.iteration for restore in line.valid} == last
    assert len(line.valid) == len(last)
    iterations = [restore.generation.iteration for restore in line.valid]
    assert iterations == sorted(iterations, reverse=True)


@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize("highest", [-1, 0, 5])
def test_process_gets_a_new_incarnation(was_there, highest):
    """Its slots have that number in their name, and those of an earlier process may be left."""
    rig = Rig(nodes=1, spares=0)
    if was_there:
        rig.run()
        rig.take_over(rig.record)
    known = {} if highest < 0 else {0: highest}
    rig.feed(ev.NodeJoined(0, "host", 1000, "node0", incarnations=known))
    (started,) = rig.of(act.StartMembers)
    assert started.incarnations == {0: max(highest, 0 if was_there else -1) + 1}


def test_agents_that_leave_at_the_end_are_not_journalled():
    rig = Rig().run()
    rig.feed(ev.UserStop())
    rig.feed(ev.NodeLost(0, "connection closed"))
    assert not rig.of(act.Note)


def test_history_is_cut_to_a_limit():
    lines = {lineage: lineage for lineage in range(1, 5001)}
    history = History(
        kept={**lines, 5001: NO_LIMIT},
        removed=dict.fromkeys((n for n in range(100_000) if n % 10_000), "x" * 100_000),
        nonfinite=dict.fromkeys(range(100_000), 1),
    )
    text = json.dumps(history.to_dict())
    assert len(text) < 60_000
    found = History.from_dict(json.loads(text))
    assert max(found.kept) == 5001
    assert max(found.nonfinite) == 99_999
    assert set(found.removed) == set(history.removed), "none of them may come back"


def test_takeover_knows_all_that_its_record_holds():
    rig = Rig(nodes=2, spares=1).run(7)
    plan = ProtectionPlan(SchemeNumbers(SchemeKind.PARITY, 4), every=3)
    failure = {"kind": "hang", "cause": "no step", "iteration": 6, "node": 1, "signature": "s"}
    history = History(
        kept={1: 5, 2: NO_LIMIT},
        removed={9: "its connection closed"},
        quarantined=frozenset({1}),
        quarantined_hosts=frozenset({"host8"}),
        nonfinite={4: 1},
        invalidated=frozenset({"/struck"}),
        failures=(failure,),
        recoveries=3,
        steps_recomputed=11,
        reported_plan=ProtectionPlan(),
    )
    restore = replace(rig.record.restore, kind="memory", generation=g(5))
    record = replace(rig.record, restore=restore, history=history, emitted_up_to=7, protection=plan)
    newest, older, struck, thrown_away = (
        Restore("durable", generation, path=path)
        for generation, path in ((g(3), "/a"), (g(2), "/b"), (g(1), "/struck"), (g(4), "/nan"))
    )
    state = rig.take_over(
        record,
        [thrown_away, newest, older, struck],
        removed={5: "its power was lost"},
        quarantined={7: "host7", 6: ""},
    )
    assert (state.record, state.epoch, dict(state.seats)) == (record, record.epoch, record.seats)
    assert (state.protection.plan, state.protection.reported) == (plan, ProtectionPlan())
    assert state.fleet.removed == {9: "its connection closed", 5: "its power was lost"}
    assert state.fleet.quarantined == {1, 6, 7}
    assert state.fleet.quarantined_hosts == {"host7", "host8"}
    assert state.fleet.draining == {1}, "it has a role"
    line = state.lineage
    assert (line.kept, line.invalidated, line.newest) == (history.kept, history.invalidated, 7)
    assert line.ever_ran
    assert line.valid == (newest, older), "neither struck off nor of an iteration thrown away"
    ((iteration, known),) = state.blame.failures
    assert (iteration, known.kind, known.signature) == (6, "hang", ("s",))
    assert state.blame.nonfinite == {4: 1}
    assert (state.recoveries.count, state.recoveries.steps_recomputed) == (3, 11)
    initial = replace(record, restore=replace(restore, kind="initial"))
    assert not rig.take_over(initial).lineage.ever_ran
