"""Requests of users in the state machine: begun, told, done or refused, also after a takeover."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.requests import refusal
from deadpool_megatron.layout.schemes import format_plan
from tests.cluster.machine.bootstrapping.test_takeover import rejoin
from tests.cluster.machine.rig import Phase, Rig, g, nodes_of


def ask(rig: Rig, verb: Verb, which: int = 1, until: float | None = None, **what: Any) -> None:
    rig.feed(ev.Asked(Request(which, f"token{which}", verb, what, until=until)))


def outcome(rig: Rig, number: int = 1) -> tuple[Stage, str]:
    request = next(one for one in rig.state.requests if one.number == number)
    return request.stage, request.reason


def begun() -> Rig:
    return Rig(nodes=2, spares=1).run(7)


def moved(rig: Rig) -> None:
    """Members stand still, and the next epoch opens."""
    rig.feed(*(ev.Paused(*rig.seat(role), rig.record.epoch, 9) for role in (0, 1)))
    rig.reopened(g(9, rig.record.epoch))


def with_one_of_two_drained() -> Rig:
    """Both nodes are asked for, and there is one spare: node 0 has no role any more."""
    rig = begun()
    for node in (0, 1):
        ask(rig, Verb.DRAIN, which=node + 1, node=node)
    moved(rig)
    return rig


def test_a_drain_moves_nothing_to_a_node_that_another_one_has_freed():
    """Who has asked may end that node: it has been told that it has no role."""
    rig = with_one_of_two_drained()
    rig.steps(10)
    assert nodes_of(rig.record) == {0: 2, 1: 1}
    assert outcome(rig, 1) == (Stage.DONE, "node 0 has no role")
    rig.feed(ev.MemberLost(0, 0, 0, signal=9))  # anew, as a spare
    rig.warm(0)
    assert rig.state.phase is Phase.RUNNING
    assert outcome(rig, 2) == (Stage.ASKED, "waits for a spare node")
    rig.join(3)
    rig.hello(3)
    rig.warm(3)
    assert outcome(rig, 2) == (Stage.UNDER_WAY, "its roles move")


def with_a_quarantined_node(nodes: int = 2) -> Rig:
    """Node 1 has crashed three times, and the spare plays role 1."""
    rig = Rig(nodes=nodes, spares=1).run(7)
    for iteration in (7, 8, 9):
        rig.kill(1, g(iteration, rig.record.epoch))
        rig.opened()
        rig.steps(iteration + 1)
    assert nodes_of(rig.record)[1] == nodes
    rig.reap()
    assert rig.state.use_of(1) == "quarantined"
    return rig


def test_a_drain_waits_for_a_better_node_than_a_quarantined_one():
    rig = with_a_quarantined_node()
    ask(rig, Verb.DRAIN, node=0)
    why = "waits for a spare node that is not quarantined, as nodes [1] are"
    assert outcome(rig) == (Stage.ASKED, why)
    assert rig.state.phase is Phase.RUNNING
    rig.join(3)
    rig.hello(3)
    rig.warm(3)
    assert outcome(rig) == (Stage.UNDER_WAY, "its roles move")
    rig.feed(*(ev.Paused(*rig.seat(role), rig.record.epoch, 12) for role in (0, 1)))
    rig.reopened(g(12, rig.record.epoch))
    assert nodes_of(rig.record) == {0: 3, 1: 2}


def test_a_slow_node_keeps_its_roles_where_only_a_quarantined_one_is_left():
    rig = with_a_quarantined_node()
    rig.feed(ev.DrainRequested(0))
    assert rig.state.phase is Phase.RUNNING
    assert rig.state.use_of(0) == "quarantined", "it is slow, wherever its roles are"


def test_a_quarantined_node_that_has_a_role_for_want_of_another_stays_quarantined():
    """Also after a takeover."""
    rig = with_a_quarantined_node()
    rig.lose(2, g(10, rig.record.epoch))
    rig.opened()
    rig.steps(11)
    assert nodes_of(rig.record) == {0: 0, 1: 1}
    assert rig.state.use_of(1) == "quarantined"
    new = rig.successor()
    assert new.state.use_of(1) == "quarantined"
    rejoin(new, rig)
    assert new.state.use_of(1) == "quarantined"


STARTED_AGAIN = (Stage.REFUSED, "all processes of the run were started again")
OPEN = (
    Request(1, "token1", Verb.DRAIN, {"node": 1}),
    Request(2, "token2", Verb.STOP, {"dump": False, "keeps": False, "reason": "enough"}),
)


def test_a_restart_of_all_processes_ends_what_was_open():
    old = begun()
    rig = old.successor(restarted=True)
    rig.feed(ev.RequestsFound(OPEN, restarted=True))
    rig.join(0, 1)
    assert outcome(rig, 1)[0] is Stage.ASKED
    assert not rig.of(act.Finish, rig.log)
    rig.join(2)
    assert rig.of(act.CloseEpoch)
    assert (outcome(rig, 1), outcome(rig, 2)) == (STARTED_AGAIN, STARTED_AGAIN)
    assert not rig.of(act.Finish, rig.log)


def test_a_new_start_ends_what_was_open_at_once():
    old = begun()
    rig = old.successor(restarted=True, has_new_command=True)
    rig.feed(ev.RequestsFound(OPEN, restarted=True))
    assert (outcome(rig, 1), outcome(rig, 2)) == (STARTED_AGAIN, STARTED_AGAIN)


def plan(rig: Rig, every: int) -> dict[str, Any]:
    wanted = replace(rig.state.protection.plan, every=every)
    return {"plan": wanted.to_dict(), "words": format_plan(wanted)}


def test_a_checkpoint_that_is_being_published_as_the_run_is_to_end_is_done_all_the_same():
    rig = begun()
    ask(rig, Verb.PERSIST, 1, directory="/a")
    ask(rig, Verb.PERSIST, 2, directory="/b")
    rig.feed(ev.DumpRequested("time limit", 100.0))
    assert outcome(rig, 1)[0] is Stage.UNDER_WAY
    assert outcome(rig, 2) == (Stage.REFUSED, "the run is ending"), "it has not begun"
    rig.feed(ev.Exported(1, 9, "/a/iter_9"))
    assert outcome(rig, 1) == (Stage.DONE, "iteration 9 is in /a/iter_9")


def test_a_stop_with_a_dump_waits_for_the_agents_after_a_takeover():
    """At once the epoch would be closed without the pause, and without the last export."""
    old = begun()
    ask(old, Verb.STOP, dump=True, reason="enough", until=old.now + 100)
    assert old.one(act.EndRun) == act.EndRun("enough", 100)
    rig = old.successor()
    found = replace(old.state.requests[0], until=rig.now + 60)
    rig.feed(ev.RequestsFound((found,)))
    rejoin(rig, old, 0, 1)
    assert not rig.of(act.EndRun)
    rejoin(rig, old, 2)
    assert rig.of(act.EndRun, rig.log) == [act.EndRun("enough", 60)]
    rig.feed(ev.DumpRequested("enough", 60))
    rig.feed(ev.UserStop())
    assert outcome(rig)[0] is Stage.FAILED, "it ended before there was a dump"


@pytest.mark.parametrize("error", ["", "no room"])
def test_a_stop_with_a_dump_is_done_when_the_dump_is_written(error):
    rig = begun()
    ask(rig, Verb.STOP, dump=True, reason="enough")
    rig.feed(ev.DumpRequested("enough", None))
    paused = rig.one(act.Pause)
    rig.feed(*(ev.Paused(*rig.seat(role), 1, paused.iteration) for role in (0, 1)))
    rig.closed(g(paused.iteration))
    dump = rig.one(act.Dump)
    rig.feed(*(ev.Dumped(node, dump.generation, error=error) for node in dump.nodes))
    stage, why = outcome(rig)
    assert (stage is Stage.DONE) == (not error)
    assert ("make room" in why) == bool(error)
    assert rig.one(act.Finish).keeps_slots == bool(error)


def test_what_cannot_be_is_refused_before_it_is_journalled():
    rig = begun()
    assert "there are: 0, 1, 2" in refusal(rig.state, Verb.DRAIN, {"node": 9})
    over = copy.deepcopy(rig)
    over.feed(ev.UserStop())
    assert refusal(over.state, Verb.DRAIN, {"node": 0}) == "the run is ending"
