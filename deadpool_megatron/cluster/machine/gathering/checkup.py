"""The fitness of the nodes that came: asked before the first epoch, and of each node
that comes later.

Before the first epoch all nodes are judged together, with the links between them if the settings
say so. Afterwards a node without a role is held against what the run has agreed on, when it joins
and when it tells its facts again. Pure functions on a Turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.actions import Probe
from deadpool_megatron.cluster.machine.epoch.closing import drop_node
from deadpool_megatron.cluster.machine.epoch.deciding import drained, seating
from deadpool_megatron.cluster.machine.epoch.ending import finish
from deadpool_megatron.cluster.machine.epoch.pausing import consider_pause
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.phases import Gathering, Phase
from deadpool_megatron.cluster.machine.state.state import Config, State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.preflight import judge
from deadpool_megatron.preflight.facts import HostFacts, Link, Needs, NodeReport
from deadpool_megatron.preflight.health import Health
from deadpool_megatron.preflight.judge import Checkup, Judgement, Pair, Standing

EXIT_NOT_GOOD = 1
# Nothing is wrong with the training: another job, on other nodes, goes on.
EXIT_NOT_ENOUGH = 75
# Of connections that a node tries at once (see vault.net.probe).
_AT_ONCE = 64
_BULK_SECONDS = 10.0
# At nodes that were slow: a link that is busy for a moment must not cost its node the role.
_MORE_LOOKS = 2
# Nobody needs what a node without a role holds alone.
_AT_REST = (Phase.GATHERING, Phase.RUNNING, Phase.PAUSING)


def is_judged(turn: Turn, gathering: Gathering) -> bool:
    """Return whether the nodes that have come are judged, and the run continues; begins to judge
    them, with whom there is."""
    state = turn.state
    if state.agreed is not None:
        return True
    if gathering.checkup is not None:
        _go_on(turn, gathering, gathering.checkup)
    elif turn.config.settings.check == "links" and len(state.fleet.nodes) > 1:
        _ask_all(turn, gathering)
    else:
        _judge_all(turn, {})
    return turn.state.agreed is not None and isinstance(turn.state.doing, Gathering)


def probed(turn: Turn, event: ev.Probed) -> None:
    """A node has tried its links."""
    match turn.state.doing:
        case Gathering(checkup=Checkup() as asked) as gathering if (
            event.number == asked.number and event.node in asked.awaited
        ):
            links = {**asked.links, event.node: (*asked.links.get(event.node, ()), *event.links)}
            asked = replace(asked, awaited=asked.awaited - {event.node}, links=links)
            turn.enter(replace(gathering, checkup=asked))
            _go_on(turn, gathering, asked)
        case _:
            turn.refuse(f"probe of node {event.node}", "nobody waits for it", event.node)


def objection(turn: Turn, event: ev.NodeJoined) -> str:
    """Returns why a node that joins may have no part in the run; empty when it may.

    One that brings state of the run, or is back with its members, is not turned away.
    """
    agreed = turn.state.agreed
    if agreed is None or not is_new(event):
        return ""
    judged = _judge_one(turn, event.facts, agreed, fresh=True)
    if judged.standing is not Standing.LEFT_OUT:
        return ""
    _emit(turn, event.node, judged, event.facts, event.domain)
    return f"left out: {judged.text}"


def is_new(event: ev.NodeJoined) -> bool:
    """Return whether a node that joins brings nothing of the run: neither state, nor members."""
    return not event.epoch and not event.members and event.found is None


def agree_again(turn: Turn) -> None:
    """After a takeover all nodes are back: what they have in common holds for those to come."""
    if turn.config.settings.check != "off":
        known = [node.facts for node in turn.state.fleet.nodes.values() if node.facts is not None]
        turn.state = turn.state._replace(agreed=judge.agree(known))


def told(turn: Turn, event: ev.FactsTold) -> None:
    """A node has looked at itself again. Memory is not asked for any more: by now it may hold
    copies.
    """
    state, fleet = turn.state, turn.state.fleet
    if event.node not in fleet.nodes:
        return
    before = fleet.nodes[event.node].facts
    known = replace(fleet.nodes[event.node], facts=event.facts)
    turn.state = state._replace(fleet=fleet.with_node(event.node, known))
    if event.node not in state.seats.nodes:
        look_again(turn, event.node, fresh=False)
    elif event.facts.health.health is not Health.GOOD and event.node not in fleet.drains:
        _move_away(turn, event.node, event.facts, None if before is None else before.health.health)


def _move_away(turn: Turn, node: int, facts: HostFacts, before: Health | None) -> None:
    """The roles of a node that trains go to a spare as soon as there is one; without one it goes
    on, as it has so far. Where it is only worse than a good one, a good one is what they go to.

    A node that was moved away from is a spare of last resort from then on: a check that fails only
    where somebody trains moves roles to each node once, not to and fro.
    """
    text = facts.health.text
    if facts.health.health is Health.OUT:
        cause = f"node {node} is put aside, its health command says: {text}"
        turn.emit(Kind.NODE_ASIDE, node=node, cause=cause, kind=FailureKind.DEVICE_ERROR)
    else:
        if before is not facts.health.health:
            judged = Judgement(Standing.WEAK, (f"its health command says: {text}",))
            _emit(turn, node, judged, facts, turn.state.fleet.nodes[node].domain)
        if not _can_spare(turn, drained(turn.state) | {node}):
            return
    turn.state = turn.state._replace(fleet=turn.state.fleet.draining(node))
    consider_pause(turn)


def look_again(turn: Turn, node: int, *, fresh: bool) -> None:
    """Judge a node without a role by what it has said last; ``fresh``: it holds nothing yet."""
    state = turn.state
    known, agreed = state.fleet.nodes[node], state.agreed
    if agreed is None:
        return
    judged = _judge_one(turn, known.facts, agreed, fresh=fresh)
    if judged == known.judged:
        return
    if judged.standing is Standing.LEFT_OUT and state.phase not in _AT_REST:
        # What it holds may be what is restored or saved; it will tell its facts again.
        fleet = replace(state.fleet, avoid=state.fleet.avoid | {node})
        turn.state = state._replace(fleet=fleet)
        return
    _emit(turn, node, judged, known.facts, known.domain)
    fleet = state.fleet.with_node(node, replace(known, judged=judged))
    if judged.standing is Standing.WEAK:
        fleet = replace(fleet, avoid=fleet.avoid | {node})
    elif judged.standing is Standing.GOOD and known.judged.standing is Standing.WEAK:
        fleet = replace(fleet, avoid=fleet.avoid - {node})
    turn.state = state._replace(fleet=fleet)
    if judged.standing is Standing.LEFT_OUT:
        _leave_out(turn, node, judged)


def needs(config: Config) -> Needs:
    """Returns what the run asks of a node."""
    # With gloo the members of a node may share a GPU, or use none. Only a mere check has not
    # decided yet what nodes with GPUs would use.
    gpus = config.nproc if config.settings.communicator in ("nccl", "auto") else 0
    return Needs(config.nodes, gpus, int(config.settings.shm_gb * 1e9))


# Asking.


def _ask_all(turn: Turn, gathering: Gathering) -> None:
    nodes = turn.state.fleet.nodes
    turns = math.ceil(len(nodes) / _AT_ONCE) + 1
    limit = turns * turn.config.settings.connect_seconds
    _ask(turn, gathering, Checkup(), {n: set(nodes) - {n} for n in nodes}, limit)


def _ask(
    turn: Turn,
    gathering: Gathering,
    checkup: Checkup,
    peers: Mapping[int, Iterable[int]],
    limit: float,
) -> None:
    """Have each of these nodes try its links to its peers; they have ``limit`` seconds."""
    nodes, until = turn.state.fleet.nodes, turn.now + limit
    asked = replace(checkup, number=checkup.number + 1, awaited=frozenset(peers), until=until)
    # The start has its own limit, which must not end what is under way.
    turn.enter(Gathering(max(gathering.deadline, until + limit), asked))
    for node in sorted(peers):
        known = {peer: nodes[peer] for peer in sorted(peers[node])}
        addresses = tuple((peer, one.host, one.vault_port) for peer, one in known.items())
        turn.act(Probe(node, asked.number, addresses, checkup.planned, limit))


def _go_on(turn: Turn, gathering: Gathering, checkup: Checkup) -> None:
    """Once all have answered, or had their time: ask the next question, or judge."""
    nodes = turn.state.fleet.nodes
    if turn.now < checkup.until and any(node in nodes for node in checkup.awaited):
        return
    if not checkup.planned:
        checkup = replace(_with_turns(checkup, judge.first_pairs(nodes)), planned=True)
    if not checkup.turns and checkup.looks < _MORE_LOOKS:
        found = judge.speeds(_reports(turn.state, checkup.links))
        again = judge.second_look(judge.slow_or_unknown(found), found, checkup.measured)
        checkup = replace(_with_turns(checkup, again), looks=checkup.looks + 1)
    if not checkup.turns:
        turn.enter(replace(gathering, checkup=None))
        _judge_all(turn, checkup.links)
        return
    pairs, *rest = checkup.turns
    peers: dict[int, set[int]] = {}
    for a, b in pairs:
        if a in nodes and b in nodes:
            peers.setdefault(a, set()).add(b)
            peers.setdefault(b, set()).add(a)
    limit = turn.config.settings.connect_seconds + _BULK_SECONDS
    checkup = replace(checkup, turns=tuple(rest), awaited=frozenset())
    if peers:
        _ask(turn, gathering, checkup, peers, limit)
    else:
        _go_on(turn, gathering, checkup)


def _with_turns(checkup: Checkup, pairs: list[Pair]) -> Checkup:
    broken = {
        (node, link.peer) for node, found in checkup.links.items() for link in found if link.error
    }
    whole = [(a, b) for a, b in pairs if not {(a, b), (b, a)} & broken]
    turns = tuple(tuple(one) for one in judge.rounds(whole))
    return replace(checkup, turns=turns, measured=(*checkup.measured, *pairs))


# Judging.


def _reports(state: State, links: Mapping[int, tuple[Link, ...]]) -> list[NodeReport]:
    return [
        NodeReport(node, known.facts, links.get(node, ()))
        for node, known in sorted(state.fleet.nodes.items())
    ]


def _judge_all(turn: Turn, links: Mapping[int, tuple[Link, ...]]) -> None:
    state, config = turn.state, turn.config
    reports = _reports(state, links)
    if config.settings.check == "off":
        judged = dict.fromkeys(state.fleet.nodes, Judgement())
    else:
        judged = judge.judge(reports, needs(config))
    _tell(turn, reports, judged)
    kept = [r for r in reports if judged[r.node].standing is not Standing.LEFT_OUT]
    changed = {
        node: replace(state.fleet.nodes[node], judged=one)
        for node, one in judged.items()
        if one.standing is not Standing.GOOD
    }
    turn.state = state._replace(
        fleet=replace(state.fleet, nodes=state.fleet.nodes.update(changed)),
        agreed=judge.agree(report.facts for report in kept if report.facts is not None),
    )
    if config.check_only:
        _end_check(turn, judged)
        return
    for report in reports:
        if judged[report.node].standing is Standing.LEFT_OUT:
            _leave_out(turn, report.node, judged[report.node])
    _weak_ones_last(turn, judged)
    left = turn.state.fleet
    more_may_come = len(left.nodes) + len(left.gone) < config.nodes + config.spares
    if len(left.nodes) < min(config.nodes, len(state.fleet.nodes)) and not more_may_come:
        finish(turn, EXIT_NOT_ENOUGH, _not_enough(len(left.nodes), config, judged))


def _tell(turn: Turn, reports: Iterable[NodeReport], judged: Mapping[int, Judgement]) -> None:
    """Of each node where people have asked for it, else of those that are not good."""
    known = list(reports)
    everything = turn.config.check_only or any(report.links for report in known)
    speeds, clocks = judge.speeds(known), judge.clocks(known)
    for report in known:
        node, speed = report.node, speeds[report.node]
        if not everything and judged[node].standing is Standing.GOOD:
            continue
        found: dict[str, object] = {}
        if speed is not None:
            found |= {"sent": speed.sent, "received": speed.received}
        trips = [link.round_trip_seconds for link in report.links if not link.error]
        if trips:
            found["round_trip_seconds"] = min(trips)
        if report.links and node in clocks:
            found["clock_seconds"] = clocks[node][0]
        _emit(turn, node, judged[node], report.facts, turn.state.fleet.nodes[node].domain, **found)


def _judge_one(
    turn: Turn, facts: HostFacts | None, agreed: judge.Agreed, *, fresh: bool
) -> Judgement:
    if turn.config.settings.check == "off":
        return Judgement()
    asked = needs(turn.config)
    asked = asked if fresh else replace(asked, shm_bytes=0)
    return Judgement.of(judge.judge_one(facts, agreed, asked))


def _weak_ones_last(turn: Turn, judged: Mapping[int, Judgement]) -> None:
    """Weak nodes give their roles to good spares, as far as there are any."""
    weak = {node for node, one in judged.items() if one.standing is Standing.WEAK}
    fleet, seated = turn.state.fleet, turn.state.seats.nodes
    turn.state = turn.state._replace(fleet=replace(fleet, avoid=fleet.avoid | weak))
    spares = sum(node not in seated and node not in weak for node in fleet.nodes)
    leaving = sorted(weak & seated)[:spares]
    while leaving and not _can_spare(turn, frozenset(leaving)):
        leaving.pop()
    turn.state = turn.state._replace(fleet=replace(turn.state.fleet, leaving=frozenset(leaving)))


def _can_spare(turn: Turn, leaving: frozenset[int]) -> bool:
    """Return whether good nodes take the roles of all these."""
    found = seating(turn, leaving)
    new = {seat.node for seat in found.seats.values()} - turn.state.seats.nodes
    return not found.unseated and not new & turn.state.fleet.avoid


def _leave_out(turn: Turn, node: int, judged: Judgement) -> None:
    cause = f"left out: {judged.text}"
    drop_node(turn, node, Failure(cause, FailureKind.LEFT_OUT, ("node", str(node)), node=node))


def _end_check(turn: Turn, judged: Mapping[int, Judgement]) -> None:
    """The run was only for this: 0 with as many good nodes as it needs, else 1."""
    state, config = turn.state, turn.config
    absent = set(range(config.nodes + config.spares)) - judged.keys()
    for node in sorted(absent):
        why = state.fleet.gone.get(node, "did not join in time")
        _emit(turn, node, Judgement(Standing.LEFT_OUT, (why,)), None, "")
    good = sum(one.standing is Standing.GOOD for one in judged.values())
    enough = good >= config.nodes
    why = "" if enough else f"not enough nodes: {good} are good, --nodes is {config.nodes}"
    finish(turn, 0 if enough else EXIT_NOT_GOOD, why)


def _not_enough(good: int, config: Config, judged: Mapping[int, Judgement]) -> str:
    bad = [
        f"node {node}: {one.standing}: {one.text}"
        for node, one in sorted(judged.items())
        if one.standing is not Standing.GOOD
    ]
    why = f" ({'; '.join(bad)})" if bad else ""
    return f"not enough nodes: {good} are good, --nodes is {config.nodes}{why}"


def _emit(
    turn: Turn,
    node: int,
    judged: Judgement,
    facts: HostFacts | None,
    domain: str,
    **more: object,
) -> None:
    data: dict[str, Any] = {
        "standing": str(judged.standing),
        "reasons": list(judged.reasons),
        "domain": domain,
        "facts": None if facts is None else facts.to_dict(),
        **more,
    }
    turn.emit(Kind.NODE_JUDGED, node=node, **data)
