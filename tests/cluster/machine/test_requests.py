"""Requests of users in the state machine: started, done or refused, also after a takeover."""

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


def ask(rig: Rig, verb: Verb, number: int = 1, until: float | None = None, **content: Any) -> None:
    rig.feed(ev.RequestMade(Request(number, f"token{number}", verb, content, until=until)))


def outcome(rig: Rig, number: int = 1) -> tuple[Stage, str]:
    request = next(known for known in rig.state.requests if known.number == number)
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
        ask(rig, Verb.DRAIN, number=node + 1, node=node)
    moved(rig)
    return rig


def test_drain_moves_no_role_to_a_drained_node():
    """The user may end that node, as the drain is reported as done."""
    rig = with_one_of_two_drained()
    rig.steps(10)
    assert nodes_of(rig.record) == {0: 2, 1: 1}
    assert outcome(rig, 1) == (Stage.DONE, "node 0 has no role")
    rig.feed(ev.MemberLost(0, 0, 0, signal=9))  # again, as a spare
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


def test_drain_waits_for_a_node_that_is_not_quarantined():
    rig = with_a_quarantined_node()
    ask(rig, Verb.DRAIN, node=0)
    reason = "waits for a spare node that is not quarantined, as nodes [1] are"
    assert outcome(rig) == (Stage.ASKED, reason)
    assert rig.state.phase is Phase.RUNNING
    rig.join(3)
    rig.hello(3)
    rig.warm(3)
    assert outcome(rig) == (Stage.UNDER_WAY, "its roles move")
    rig.feed(*(ev.Paused(*rig.seat(role), rig.record.epoch, 12) for role in (0, 1)))
    rig.reopened(g(12, rig.record.epoch))
    assert nodes_of(rig.record) == {0: 3, 1: 2}


def test_slow_node_keeps_its_roles_if_only_a_quarantined_node_is_left():
    rig = with_a_quarantined_node()
    rig.feed(ev.DrainRequested(0))
    assert rig.state.phase is Phase.RUNNING
    assert rig.state.use_of(0) == "quarantined", "it is slow, wherever its roles are"


def test_quarantined_node_with_a_role_stays_quarantined():
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


def test_restart_of_all_processes_ends_open_requests():
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


def test_new_start_ends_open_requests_at_once():
    old = begun()
    rig = old.successor(restarted=True, has_new_command=True)
    rig.feed(ev.RequestsFound(OPEN, restarted=True))
    assert (outcome(rig, 1), outcome(rig, 2)) == (STARTED_AGAIN, STARTED_AGAIN)


def plan(rig: Rig, every: int) -> dict[str, Any]:
    wanted = replace(rig.state.protection.plan, every=every)
    return {"plan": wanted.to_dict(), "words": format_plan(wanted)}


def test_checkpoint_being_published_is_done_although_the_run_ends():
    rig = begun()
    ask(rig, Verb.PERSIST, 1, directory="/a")
    ask(rig, Verb.PERSIST, 2, directory="/b")
    rig.feed(ev.DumpRequested("time limit", 100.0))
    assert outcome(rig, 1)[0] is Stage.UNDER_WAY
    assert outcome(rig, 2) == (Stage.REFUSED, "the run is ending"), "it has not begun"
    rig.feed(ev.Exported(1, 9, "/a/iter_9"))
    assert outcome(rig, 1) == (Stage.DONE, "iteration 9 is in /a/iter_9")


def test_stop_with_a_dump_waits_for_the_agents_after_a_takeover():
    """At once the epoch would be closed without the pause, and without the last export."""
    old = begun()
    ask(old, Verb.STOP, dump=True, reason="enough", until=old.now + 100)
    assert old.only(act.EndRun) == act.EndRun("enough", 100)
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
def test_stop_with_a_dump_is_done_when_the_dump_is_written(error):
    rig = begun()
    ask(rig, Verb.STOP, dump=True, reason="enough")
    rig.feed(ev.DumpRequested("enough", None))
    paused = rig.only(act.Pause)
    rig.feed(*(ev.Paused(*rig.seat(role), 1, paused.iteration) for role in (0, 1)))
    rig.closed(g(paused.iteration))
    dump = rig.only(act.Dump)
    rig.feed(*(ev.Dumped(node, dump.generation, error=error) for node in dump.nodes))
    stage, reason = outcome(rig)
    assert (stage is Stage.DONE) == (not error)
    assert ("make room" in reason) == bool(error)
    assert rig.only(act.Finish).keeps_slots == bool(error)


def test_impossible_request_is_refused_before_the_journal():
    rig = begun()
    assert "there are: 0, 1, 2" in refusal(rig.state, Verb.DRAIN, {"node": 9})
    over = copy.deepcopy(rig)
    over.feed(ev.UserStop())
    assert refusal(over.state, Verb.DRAIN, {"node": 0}) == "the run is ending"
