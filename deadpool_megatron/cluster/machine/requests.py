"""Requests of users: begun when they can be, and told when they are done. Pure functions on a Turn.

A request is journalled before it comes here, and comes again from the journal to a coordinator that
takes over, which continues with what is open as soon as the agents are back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.journal.requests import Request, Stage, Verb, kept
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine import protection
from deadpool_megatron.cluster.machine.actions import BeginExport, EndRun
from deadpool_megatron.cluster.machine.epoch import ending
from deadpool_megatron.cluster.machine.epoch.pausing import consider_pause
from deadpool_megatron.cluster.machine.gathering.takeover import STARTED_AGAIN
from deadpool_megatron.cluster.machine.state.phases import LAST_PHASES, Pausing, Phase, Rejoining
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.schemes import ProtectionPlan, plan_in_words

_ENDING = "the run is ending"


def found(turn: Turn, event: ev.RequestsFound) -> None:
    """Requests that earlier coordinators were asked; what they had begun is begun again. After a
    restart of all processes what was open is over; where that is only assumed, it waits for what
    agents say.
    """
    again, doing = [], turn.state.doing
    restarted = event.restarted and not turn.state.survived
    assumed = restarted and isinstance(doing, Rejoining) and not turn.config.begins_anew
    for request in event.requests:
        if request.is_open and restarted and not assumed:
            request = request.at(Stage.REFUSED, STARTED_AGAIN)
        elif request.is_open:
            request = request.at(Stage.ASKED)
        again.append(request)
    if assumed and isinstance(doing, Rejoining):
        waiting = frozenset(request.number for request in again if request.is_open)
        turn.enter(replace(doing, requests=waiting))
    # A stop that could not wait for the journal was counted without them.
    highest = max((request.number for request in again), default=0)
    ours = [replace(one, number=highest + n) for n, one in enumerate(turn.state.requests, 1)]
    turn.state = turn.state._replace(requests=kept((*again, *ours)))


def take(turn: Turn, event: ev.Asked) -> None:
    """A user has asked, and the journal has it."""
    turn.state = turn.state._replace(requests=kept((*turn.state.requests, event.request)))


def exported(turn: Turn, event: ev.Exported) -> None:
    """The checkpoint that was asked for is written, or came to nothing."""
    for request in turn.state.requests:
        if request.number == event.number and request.is_open:
            stage, what = Stage.DONE, f"iteration {event.iteration} is in {event.path}"
            if not event.path:
                what = f"no checkpoint of iteration {event.iteration}: {event.error}"
                stage = Stage.REFUSED
            turn.change(request.at(stage, what))


def settle(turn: Turn) -> None:
    """After each input: what can be begun now, and what is done by now."""
    before: tuple[Request, ...] = ()
    while before is not turn.state.requests:  # one may make way for another, or overtake it
        before = turn.state.requests
        _settle_each(turn)


def _settle_each(turn: Turn) -> None:
    for request in turn.state.requests:
        if not request.is_open:
            continue
        state = turn.state
        is_known = state.phase is not Phase.GATHERING or state.record is None
        if state.phase in (Phase.ENDING, Phase.ENDED):
            done = request.verb is Verb.STOP
            if done and request.stage is Stage.ASKED:
                ending.stop(turn, str(request.what["reason"]))
            turn.change(request.at(Stage.DONE if done else Stage.REFUSED, _ENDING))
        elif isinstance(state.doing, Rejoining) and request.number in state.doing.requests:
            continue
        elif is_known or _needs_nobody(request):
            turn.change(_MOVES[request.verb](turn, request))


def refusal(state: State, verb: Verb, what: Mapping[str, Any]) -> str:
    """Return why a request cannot be taken, found out before it is journalled; empty if it can."""
    if state.phase in (Phase.ENDING, Phase.ENDED) and verb is not Verb.STOP:
        return _ENDING
    is_back = state.phase is not Phase.GATHERING or state.record is None
    return not_connected(state, what["node"]) if verb is Verb.DRAIN and is_back else ""


def not_connected(state: State, node: int) -> str:
    """Return that a node is not, in words; empty if it is."""
    if node in state.fleet.nodes:
        return ""
    there = ", ".join(map(str, sorted(state.fleet.nodes)))
    return f"node {node} is not connected (there are: {there})"


def _needs_nobody(request: Request) -> bool:
    """Return whether it does not matter which agents are here."""
    return request.verb is Verb.STOP and not request.what["dump"]


def _drain(turn: Turn, request: Request) -> Request:
    node, state = int(request.what["node"]), turn.state
    if state.phase in LAST_PHASES:
        return request.at(Stage.REFUSED, _ENDING)
    if node not in state.fleet.nodes:
        return request.at(Stage.REFUSED, _fate(turn, node, "is not connected"))
    if node not in state.seats.nodes:
        # Who has asked may end the node, and the coordinator with it: the move is over first.
        if state.phase is not Phase.RUNNING or state.recoveries.current is not None:
            return request
        return request.at(Stage.DONE, f"node {node} has no role")
    if node not in state.fleet.drains and node not in state.fleet.leaving:
        turn.emit(Kind.DRAIN, node=node)
        turn.state = state._replace(fleet=state.fleet.draining(node))
        consider_pause(turn)
    doing = turn.state.doing
    paused = doing.order.leaving if isinstance(doing, Pausing) else frozenset[int]()
    if node in turn.state.fleet.leaving | paused:
        return request.at(Stage.UNDER_WAY, "its roles move")
    return request.at(Stage.ASKED, "waits for a spare node")


def _protect(turn: Turn, request: Request) -> Request:
    plan, state = ProtectionPlan.from_dict(request.what["plan"]), turn.state
    if state.phase in LAST_PHASES:
        return request.at(Stage.REFUSED, _ENDING)
    if state.record is not None and state.record.protection == plan == state.protection.plan:
        return request.at(Stage.DONE) if state.phase is Phase.RUNNING else request
    if request.stage is Stage.ASKED:
        why = protection.take_request(turn, ev.ProtectionRequested(plan, protection.ASKED_FOR))
        if why:
            return request.at(Stage.REFUSED, why)
        consider_pause(turn)
        return request.at(Stage.UNDER_WAY, "comes with the next protected iteration")
    if state.protection.plan != plan:
        return request.at(
            Stage.REFUSED, f"{plan_in_words(state.protection.plan)} was chosen after it"
        )
    return request


def _persist(turn: Turn, request: Request) -> Request:
    state = turn.state
    if request.stage is Stage.UNDER_WAY:
        return request  # one that is being published is not called back: its course answers
    if state.phase in LAST_PHASES or state.last_words is not None:
        return request.at(Stage.REFUSED, _ENDING)
    others = (one for one in state.requests if one.verb is Verb.PERSIST)
    is_busy = any(one.stage is Stage.UNDER_WAY for one in others)
    if state.phase is Phase.RUNNING and not is_busy:
        turn.act(BeginExport(request.number, str(request.what["directory"])))
        return request.at(Stage.UNDER_WAY)
    return request


def _stop(turn: Turn, request: Request) -> Request:
    if request.stage is Stage.UNDER_WAY:
        return request
    reason = str(request.what["reason"])
    if not request.what["dump"]:
        ending.stop(turn, reason)
        return request.at(Stage.DONE)
    left = None if request.until is None else max(0.0, request.until - turn.now)
    turn.act(EndRun(reason, left))
    return request.at(Stage.UNDER_WAY)


def _fate(turn: Turn, node: int, otherwise: str) -> str:
    """Return what has become of a node; ``otherwise``: if that is not known."""
    why = turn.state.fleet.gone.get(node, otherwise)
    return why if why.startswith(f"node {node}") else f"node {node} {why}"


_MOVES: Mapping[Verb, Callable[[Turn, Request], Request]] = {
    Verb.DRAIN: _drain,
    Verb.PROTECT: _protect,
    Verb.PERSIST: _persist,
    Verb.STOP: _stop,
}
