"""Requests of users: started as soon as they can be, and reported when they are done.

A request is journalled before it arrives here. A coordinator that takes over gets it from the
journal, and continues open requests as soon as the agents are back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb, prune
from deadpool_megatron.cluster.machine import chosen_plan, inputs as ev, shutdown, state as states
from deadpool_megatron.cluster.machine.actions import BeginExport, EndRun
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.pauses import consider_pause, drain
from deadpool_megatron.layout.schemes import ProtectionPlan, format_plan

STARTED_AGAIN = "all processes of the run were started again"
_ENDING = "the run is ending"


def adopt(core: Core, event: ev.RequestsFound) -> None:
    """Adopt the requests made to earlier coordinators; a request that was started starts again.
    After a restart of all processes open requests are over. If that is only assumed, they wait
    until the agents have reported."""
    adopted, phase_state = [], core.state.phase_state
    restarted = event.restarted and not core.state.survived
    is_sure = core.config.has_new_command or not isinstance(phase_state, states.TakingOver)
    for request in event.requests:
        if request.is_open and restarted and is_sure:
            request = request.at(Stage.REFUSED, STARTED_AGAIN)
        elif request.is_open:
            request = request.at(Stage.ASKED)
        adopted.append(request)
    if restarted and isinstance(phase_state, states.TakingOver) and not is_sure:
        phase_state.requests = frozenset(request.number for request in adopted if request.is_open)
    # A stop that could not wait for the journal was numbered without knowledge of these requests.
    highest = max((request.number for request in adopted), default=0)
    own = [replace(request, number=highest + n) for n, request in enumerate(core.state.requests, 1)]
    core.state.requests = prune((*adopted, *own))


def refuse_assumed(core: Core, numbers: frozenset[int]) -> None:
    """Refuse the requests with these numbers, as no earlier process has come back."""
    for request in core.state.requests:
        if request.number in numbers and request.is_open:
            _change(core, request.at(Stage.REFUSED, STARTED_AGAIN))


def add(core: Core, event: ev.RequestMade) -> None:
    """Add the request of a user."""
    core.state.requests = prune((*core.state.requests, event.request))


def exported(core: Core, event: ev.Exported) -> None:
    """Note that a requested checkpoint is written, or has failed."""
    for request in core.state.requests:
        if request.number == event.number and request.is_open:
            stage, result = Stage.DONE, f"iteration {event.iteration} is in {event.path}"
            if not event.path:
                result = f"no checkpoint of iteration {event.iteration}: {event.error}"
                stage = Stage.REFUSED
            _change(core, request.at(stage, result))


def advance(core: Core) -> None:
    """Start the requests that can start now, and note which are done, after each input."""
    before: tuple[Request, ...] = ()
    while before is not core.state.requests:  # a change of a request may allow or end another
        before = core.state.requests
        for request in before:
            if request.is_open:
                _advance(core, request)


def _advance(core: Core, request: Request) -> None:
    phase_state = core.state.phase_state
    is_back = core.state.phase is not states.Phase.BOOTSTRAPPING or core.state.record is None
    if core.state.phase in (states.Phase.ENDING, states.Phase.ENDED):
        is_stop = request.verb is Verb.STOP
        if is_stop and request.stage is Stage.ASKED:
            shutdown.stop(core, _user_stop(request))
        unsaved = ""
        if isinstance(phase_state, states.Ending) and request.content.get("dump"):
            unsaved = phase_state.unsaved
        stage = (Stage.FAILED if unsaved else Stage.DONE) if is_stop else Stage.REFUSED
        _change(core, request.at(stage, unsaved or _ENDING))
    elif isinstance(phase_state, states.TakingOver) and request.number in phase_state.requests:
        return
    elif is_back or (request.verb is Verb.STOP and not request.content["dump"]):
        # A stop without a dump need not wait for agents to come back.
        _change(core, _STEPS[request.verb](core, request))


def _change(core: Core, request: Request) -> None:
    """Replace the request that has the same number; report a new stage."""
    requests = core.state.requests
    before = next(old for old in requests if old.number == request.number)
    if before == request:
        return
    core.state.requests = tuple(request if old is before else old for old in requests)
    if before.stage is not request.stage:
        reason = f": {request.reason}" if request.reason else ""
        text = f"request {request.number}, {request.describe()}: {request.stage}{reason}"
        is_bad = request.stage in (Stage.REFUSED, Stage.FAILED)
        core.log("warning" if is_bad else "info", text)


def refusal(state: states.State, verb: Verb, details: Mapping[str, Any]) -> str:
    """Return why a request must not be journalled; empty if it may."""
    if state.phase in (states.Phase.ENDING, states.Phase.ENDED) and verb is not Verb.STOP:
        return _ENDING
    is_back = state.phase is not states.Phase.BOOTSTRAPPING or state.record is None
    return not_connected(state, details["node"]) if verb is Verb.DRAIN and is_back else ""


def not_connected(state: states.State, node: int) -> str:
    """Return a text that the node is not connected; empty if it is."""
    if node in state.fleet.nodes:
        return ""
    connected = ", ".join(map(str, sorted(state.fleet.nodes)))
    return f"node {node} is not connected (there are: {connected})"


def _drain(core: Core, request: Request) -> Request:
    node, state = int(request.content["node"]), core.state
    fleet = state.fleet
    if state.phase in states.LAST_PHASES:
        return request.at(Stage.REFUSED, _ENDING)
    if node not in fleet.nodes:
        reason = fleet.removed.get(node, "is not connected")
        text = reason if reason.startswith(f"node {node}") else f"node {node} {reason}"
        return request.at(Stage.REFUSED, text)
    if node not in state.seats.nodes:
        # Once this is reported as done, the user may end the node, and the coordinator with it. So
        # the recovery must be over.
        if state.phase is not states.Phase.RUNNING or state.recoveries.current is not None:
            return request
        fleet.deprioritized |= {node}
        return request.at(Stage.DONE, f"node {node} has no role")
    if node not in fleet.drains and node not in fleet.draining:
        drain(core, node)
    pausing = state.phase_state
    drained = pausing.order.draining if isinstance(pausing, states.Pausing) else frozenset[int]()
    if node in fleet.draining | drained:
        return request.at(Stage.UNDER_WAY, "its roles move")
    barred_nodes = sorted((fleet.distrusted | fleet.quarantined) & fleet.nodes.keys() - {node})
    reason = f" that is not quarantined, as nodes {barred_nodes} are" if barred_nodes else ""
    return request.at(Stage.ASKED, f"waits for a spare node{reason}")


def _protect(core: Core, request: Request) -> Request:
    plan, state = ProtectionPlan.from_dict(request.content["plan"]), core.state
    if state.phase in states.LAST_PHASES:
        return request.at(Stage.REFUSED, _ENDING)
    if state.record is not None and state.record.protection == plan == state.protection.plan:
        return request.at(Stage.DONE) if state.phase is states.Phase.RUNNING else request
    if request.stage is Stage.ASKED:
        reason = chosen_plan.take_request(core, ev.ProtectionRequested(plan, chosen_plan.ASKED_FOR))
        if reason:
            return request.at(Stage.REFUSED, reason)
        consider_pause(core)
        return request.at(Stage.UNDER_WAY, "comes with the next protected iteration")
    if state.protection.plan != plan:
        later = format_plan(state.protection.plan)
        return request.at(Stage.REFUSED, f"replaced by a later one: {later}")
    return request


def _persist(core: Core, request: Request) -> Request:
    state = core.state
    if request.stage is Stage.UNDER_WAY:
        return request  # a checkpoint under way is not cancelled; its end answers the request
    if state.phase in states.LAST_PHASES or state.final is not None:
        return request.at(Stage.REFUSED, _ENDING)
    others = (other for other in state.requests if other.verb is Verb.PERSIST)
    is_busy = any(other.stage is Stage.UNDER_WAY for other in others)
    if state.phase is states.Phase.RUNNING and not is_busy:
        core.act(BeginExport(request.number, str(request.content["directory"])))
        return request.at(Stage.UNDER_WAY)
    return request


def _stop(core: Core, request: Request) -> Request:
    if request.stage is Stage.UNDER_WAY:
        return request
    if not request.content["dump"]:
        shutdown.stop(core, _user_stop(request))
        return request.at(Stage.DONE)
    seconds = None if request.until is None else max(0.0, request.until - core.now)
    core.act(EndRun(str(request.content["reason"]), seconds))
    return request.at(Stage.UNDER_WAY)


def _user_stop(request: Request) -> ev.UserStop:
    return ev.UserStop(str(request.content["reason"]), keeps=bool(request.content["keeps"]))


_STEPS: Mapping[Verb, Callable[[Core, Request], Request]] = {
    Verb.DRAIN: _drain,
    Verb.PROTECT: _protect,
    Verb.PERSIST: _persist,
    Verb.STOP: _stop,
}
