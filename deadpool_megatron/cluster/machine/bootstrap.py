"""Bootstrap: nodes come and are judged, and the first epoch is decided when enough of them are fit.

Before the first epoch all nodes are judged together, with the links between them if the settings
say so. Afterwards a node without a role is held against what the run has agreed on, when it joins
and when it tells its facts again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.failures import ExitStatus, FailureKind
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine import takeover
from deadpool_megatron.cluster.machine.actions import DropNode, Probe, Welcome
from deadpool_megatron.cluster.machine.blame import Failure
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.ending import finish
from deadpool_megatron.cluster.machine.epoch import decide, drained, seating
from deadpool_megatron.cluster.machine.membership import drop_node, silent
from deadpool_megatron.cluster.machine.pauses import consider_pause
from deadpool_megatron.cluster.machine.state import (
    LAST_PHASES,
    Config,
    Gathering,
    MemberStatus,
    NodeState,
    Phase,
    Place,
    Rejoining,
    State,
    WaitingSpare,
)
from deadpool_megatron.events import Kind
from deadpool_megatron.preflight import judge
from deadpool_megatron.preflight.facts import HostFacts, Link, Needs, NodeReport
from deadpool_megatron.preflight.health import Health
from deadpool_megatron.preflight.judge import Checkup, Judgement, Pair, Standing

# Of connections that a node tries at once (see vault.net.probe).
_AT_ONCE = 64
_BULK_SECONDS = 10.0
# At nodes that were slow: a link that is busy for a moment must not cost its node the role.
_MORE_LOOKS = 2
# Nobody needs what a node without a role holds alone.
_AT_REST = (Phase.GATHERING, Phase.RUNNING, Phase.PAUSING)

# Nodes come.


def node_joined(core: Core, event: ev.NodeJoined) -> None:
    """A node has come: welcome it and have its members started, or turn it away."""
    state, node = core.state, event.node
    fleet = state.fleet
    if why := _refusal(core, event):
        core.refuse(f"join of node {node}", why, node)
        if node not in fleet.nodes:
            core.act(DropNode(node, why))
        return
    address = event.host, event.vault_port, event.domain
    joined = NodeState(*address, event.memory_bytes, event.returns, facts=event.facts)
    is_wrong = joined.host_name in fleet.wrong_hosts
    if is_wrong and _is_new(event):
        why = f"left out: {joined.host_name} was put aside for the rest of this run"
        core.refuse(f"join of node {node}", why, node)
        core.act(DropNode(node, why, left_out=True))
        return
    if why := _objection(core, event):
        core.act(DropNode(node, why, left_out=True))
        return
    fleet.nodes[node] = joined
    if is_wrong:  # what it brings may be wanted, but it gets no role
        fleet.wrong |= {node}
    if event.found is not None:
        state.memory.found[node] = event.found
    spare = node not in state.seats.nodes
    core.emit(Kind.NODE_JOINED, node=node, host=event.host, spare=spare)
    core.act(Welcome(node, state.record))
    to_start: dict[int, int] = {}
    for slot in range(core.config.nproc):
        if slot in event.members:
            core.set_member((node, slot), MemberStatus.RUNNING, event.members[slot])
        else:
            # What an earlier coordinator started has been there already.
            was_there = state.record is not None and node in state.record.nodes
            role = state.seats.role_by_place.get((node, slot))
            seated = 0 if role is None else state.seats[role].incarnation
            known = seated if was_there else -1
            to_start[slot] = max(known, event.incarnations.get(slot, -1)) + 1
    takeover.note_join(core, event)
    if spare:
        _look_again(core, node, fresh=not event.epoch and event.found is None)
    if to_start and not core.config.check_only:
        core.start_members(node, to_start)
    if isinstance(state.doing, WaitingSpare):
        decide(core)
    consider_pause(core)


def _refusal(core: Core, event: ev.NodeJoined) -> str:
    """Return why a node cannot join; empty when it can."""
    state, node = core.state, event.node
    if state.phase in LAST_PHASES:
        return "the run is ending"
    if left_behind := takeover.left_behind(core, event):
        return left_behind
    if node in state.fleet.gone:
        return state.fleet.gone[node]
    return "it is connected already" if node in state.fleet.nodes else ""


def _objection(core: Core, event: ev.NodeJoined) -> str:
    """Returns why a node that joins may have no part in the run; empty when it may.

    One that brings state of the run, or is back with its members, is not turned away.
    """
    agreed = core.state.agreed
    if agreed is None or not _is_new(event):
        return ""
    judged = _judge_one(core, event.facts, agreed, fresh=True)
    if judged.standing is not Standing.LEFT_OUT:
        return ""
    _emit(core, event.node, judged, event.facts, event.domain)
    return f"left out: {judged.text}"


def _is_new(event: ev.NodeJoined) -> bool:
    """Return whether a node that joins brings nothing of the run: neither state, nor members."""
    return not event.epoch and not event.members and event.found is None


# The first epoch.


def check_gathered(core: Core) -> None:
    """Decide the first epoch when all wished nodes are judged and run their members; after a
    takeover continue when all have rejoined.

    Spares are no condition, but get ``connect_seconds`` to join, so that the first record has them.
    """
    match core.state.doing:
        case Rejoining() as rejoining if core.state.record is not None:
            takeover.check_all_back(core, rejoining, core.state.record)
        case Gathering() as gathering:
            begun = gathering.checkup is not None or core.state.agreed is not None
            if not begun and not _enough_have_come(core, gathering.deadline):
                return
            if _is_judged(core, gathering) and not _seated_is_starting(core.state):
                seats = seating(core, core.state.fleet.leaving)
                places = [(seat.node, seat.slot) for seat in seats.seats.values()]
                if not seats.unseated and all(_runs(core, place) for place in places):
                    decide(core)


def _enough_have_come(core: Core, deadline: float) -> bool:
    # The counts are looked at first: this is asked for every join and every hello.
    fleet, config = core.state.fleet, core.config
    began = deadline - config.settings.start_seconds
    patient = core.now < began + config.settings.connect_seconds or config.check_only
    wanted = config.nodes + (config.spares if patient else 0)
    return len(fleet.nodes) + len(fleet.gone) >= wanted and not fleet.absent(core.state.seats.nodes)


def _seated_is_starting(state: State) -> bool:
    """Return whether a member whose own role waits for it did not say hello yet."""
    places = state.seats.role_by_place
    return any(place in places for place in state.fleet.members.starting)


def _runs(core: Core, place: Place) -> bool:
    return core.state.fleet.members[place].status in (MemberStatus.RUNNING, MemberStatus.WARM)


def gathered_enough(core: Core, gathering: Gathering, waited: str) -> None:
    """Go on without the late ones if spares can take their place, else end the run."""
    state, fleet = core.state, core.state.fleet
    for node in fleet.absent(state.seats.nodes):
        fleet.gone[node] = "did not join in time"
    if not _is_judged(core, gathering):
        return
    for node in sorted({place[0] for place in fleet.members if not _runs(core, place)}):
        drop_node(core, node, silent(node, "did not start its members in time"))
    unseated = seating(core, frozenset()).unseated
    if unseated:
        who = ", ".join(f"node {n}: {why}" for n, why in sorted(fleet.gone.items()))
        why = f"no members for roles {list(unseated)} ({who or waited})"
        finish(core, ExitStatus.BAD_INPUT, why)
    else:
        decide(core)


def _is_judged(core: Core, gathering: Gathering) -> bool:
    """Return whether the nodes that have come are judged, and the run continues; begins to judge
    them, with whom there is."""
    state = core.state
    if state.agreed is not None:
        return True
    if gathering.checkup is not None:
        _go_on(core, gathering, gathering.checkup)
    elif core.config.settings.check == "links" and len(state.fleet.nodes) > 1:
        _ask_all(core, gathering)
    else:
        _judge_all(core, {})
    return core.state.agreed is not None and core.state.doing is gathering


# Facts that are told again.


def told(core: Core, event: ev.FactsTold) -> None:
    """A node has looked at itself again. Memory is not asked for any more: by now it may hold
    copies.
    """
    fleet = core.state.fleet
    if (known := fleet.nodes.get(event.node)) is None:
        return
    before, known.facts = known.facts, event.facts
    if event.node not in core.state.seats.nodes:
        _look_again(core, event.node, fresh=False)
    elif event.facts.health.health is not Health.GOOD and event.node not in fleet.drains:
        _move_away(core, event.node, event.facts, None if before is None else before.health.health)


def _move_away(core: Core, node: int, facts: HostFacts, before: Health | None) -> None:
    """The roles of a node that trains go to a spare as soon as there is one; without one it goes
    on, as it has so far. Where it is only worse than a good one, a good one is what they go to.

    A node that was moved away from is a spare of last resort from then on: a check that fails only
    where somebody trains moves roles to each node once, not to and fro.
    """
    text = facts.health.text
    if facts.health.health is Health.OUT:
        cause = f"node {node} is put aside, its health command says: {text}"
        core.emit(Kind.NODE_ASIDE, node=node, cause=cause, kind=FailureKind.DEVICE_ERROR)
    else:
        if before is not facts.health.health:
            judged = Judgement(Standing.WEAK, (f"its health command says: {text}",))
            _emit(core, node, judged, facts, core.state.fleet.nodes[node].domain)
        if not _can_spare(core, drained(core.state) | {node}):
            return
    core.state.fleet.drains |= {node}
    consider_pause(core)


def _look_again(core: Core, node: int, *, fresh: bool) -> None:
    """Judge a node without a role by what it has said last; ``fresh``: it holds nothing yet."""
    fleet, agreed = core.state.fleet, core.state.agreed
    known = fleet.nodes[node]
    if agreed is None:
        return
    judged = _judge_one(core, known.facts, agreed, fresh=fresh)
    if judged == known.judged:
        return
    if judged.standing is Standing.LEFT_OUT and core.state.phase not in _AT_REST:
        # What it holds may be what is restored or saved; it will tell its facts again.
        fleet.avoid |= {node}
        return
    _emit(core, node, judged, known.facts, known.domain)
    if judged.standing is Standing.WEAK:
        fleet.avoid |= {node}
    elif judged.standing is Standing.GOOD and known.judged.standing is Standing.WEAK:
        fleet.avoid -= {node}
    known.judged = judged
    if judged.standing is Standing.LEFT_OUT:
        _leave_out(core, node, judged)


# Asking.


def probed(core: Core, event: ev.Probed) -> None:
    """A node has tried its links."""
    match core.state.doing:
        case Gathering(checkup=Checkup() as asked) as gathering if (
            event.number == asked.number and event.node in asked.awaited
        ):
            links = {**asked.links, event.node: (*asked.links.get(event.node, ()), *event.links)}
            asked = replace(asked, awaited=asked.awaited - {event.node}, links=links)
            gathering.checkup = asked
            _go_on(core, gathering, asked)
        case _:
            core.refuse(f"probe of node {event.node}", "nobody waits for it", event.node)


def _ask_all(core: Core, gathering: Gathering) -> None:
    nodes = core.state.fleet.nodes
    turns = math.ceil(len(nodes) / _AT_ONCE) + 1
    limit = turns * core.config.settings.connect_seconds
    _ask(core, gathering, Checkup(), {n: set(nodes) - {n} for n in nodes}, limit)


def _ask(
    core: Core,
    gathering: Gathering,
    checkup: Checkup,
    peers: Mapping[int, Iterable[int]],
    limit: float,
) -> None:
    """Have each of these nodes try its links to its peers; they have ``limit`` seconds."""
    nodes, until = core.state.fleet.nodes, core.now + limit
    asked = replace(checkup, number=checkup.number + 1, awaited=frozenset(peers), until=until)
    # The start has its own limit, which must not end what is under way.
    gathering.deadline, gathering.checkup = max(gathering.deadline, until + limit), asked
    for node in sorted(peers):
        known = {peer: nodes[peer] for peer in sorted(peers[node])}
        addresses = tuple((peer, one.host, one.vault_port) for peer, one in known.items())
        core.act(Probe(node, asked.number, addresses, checkup.planned, limit))


def _go_on(core: Core, gathering: Gathering, checkup: Checkup) -> None:
    """Once all have answered, or had their time: ask the next question, or judge."""
    nodes = core.state.fleet.nodes
    if core.now < checkup.until and any(node in nodes for node in checkup.awaited):
        return
    if not checkup.planned:
        checkup = replace(_with_turns(checkup, judge.first_pairs(nodes)), planned=True)
    if not checkup.turns and checkup.looks < _MORE_LOOKS:
        found = judge.speeds(_reports(core.state, checkup.links))
        again = judge.second_look(judge.slow_or_unknown(found), found, checkup.measured)
        checkup = replace(_with_turns(checkup, again), looks=checkup.looks + 1)
    if not checkup.turns:
        gathering.checkup = None
        _judge_all(core, checkup.links)
        return
    pairs, *rest = checkup.turns
    peers: dict[int, set[int]] = {}
    for a, b in pairs:
        if a in nodes and b in nodes:
            peers.setdefault(a, set()).add(b)
            peers.setdefault(b, set()).add(a)
    limit = core.config.settings.connect_seconds + _BULK_SECONDS
    checkup = replace(checkup, turns=tuple(rest), awaited=frozenset())
    if peers:
        _ask(core, gathering, checkup, peers, limit)
    else:
        _go_on(core, gathering, checkup)


def _with_turns(checkup: Checkup, pairs: list[Pair]) -> Checkup:
    broken = {
        (node, link.peer) for node, found in checkup.links.items() for link in found if link.error
    }
    whole = [(a, b) for a, b in pairs if not {(a, b), (b, a)} & broken]
    turns = tuple(tuple(one) for one in judge.rounds(whole))
    return replace(checkup, turns=turns, measured=(*checkup.measured, *pairs))


# Judging.


def _needs(config: Config) -> Needs:
    """Returns what the run asks of a node."""
    # With gloo the members of a node may share a GPU, or use none. Only a mere check has not
    # decided yet what nodes with GPUs would use.
    gpus = config.nproc if config.settings.communicator in ("nccl", "auto") else 0
    return Needs(config.nodes, gpus, int(config.settings.shm_gb * 1e9))


def _reports(state: State, links: Mapping[int, tuple[Link, ...]]) -> list[NodeReport]:
    return [
        NodeReport(node, known.facts, links.get(node, ()))
        for node, known in sorted(state.fleet.nodes.items())
    ]


def _judge_all(core: Core, links: Mapping[int, tuple[Link, ...]]) -> None:
    state, config = core.state, core.config
    reports = _reports(state, links)
    if config.settings.check == "off":
        judged = dict.fromkeys(state.fleet.nodes, Judgement())
    else:
        judged = judge.judge(reports, _needs(config))
    _tell(core, reports, judged)
    kept = [r for r in reports if judged[r.node].standing is not Standing.LEFT_OUT]
    for node, one in judged.items():
        state.fleet.nodes[node].judged = one
    state.agreed = judge.agree(report.facts for report in kept if report.facts is not None)
    if config.check_only:
        _end_check(core, judged)
        return
    for report in reports:
        if judged[report.node].standing is Standing.LEFT_OUT:
            _leave_out(core, report.node, judged[report.node])
    _weak_ones_last(core, judged)
    left = state.fleet
    more_may_come = len(left.nodes) + len(left.gone) < config.nodes + config.spares
    if len(left.nodes) < min(config.nodes, len(reports)) and not more_may_come:
        finish(core, ExitStatus.SAVED, _not_enough(len(left.nodes), config, judged))


def _tell(core: Core, reports: Iterable[NodeReport], judged: Mapping[int, Judgement]) -> None:
    """Of each node where people have asked for it, else of those that are not good."""
    known = list(reports)
    everything = core.config.check_only or any(report.links for report in known)
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
        _emit(core, node, judged[node], report.facts, core.state.fleet.nodes[node].domain, **found)


def _judge_one(
    core: Core, facts: HostFacts | None, agreed: judge.Agreed, *, fresh: bool
) -> Judgement:
    if core.config.settings.check == "off":
        return Judgement()
    asked = _needs(core.config)
    asked = asked if fresh else replace(asked, shm_bytes=0)
    return Judgement.of(judge.judge_one(facts, agreed, asked))


def _weak_ones_last(core: Core, judged: Mapping[int, Judgement]) -> None:
    """Weak nodes give their roles to good spares, as far as there are any."""
    weak = {node for node, one in judged.items() if one.standing is Standing.WEAK}
    fleet, seated = core.state.fleet, core.state.seats.nodes
    fleet.avoid |= weak
    spares = sum(node not in seated and node not in weak for node in fleet.nodes)
    leaving = sorted(weak & seated)[:spares]
    while leaving and not _can_spare(core, frozenset(leaving)):
        leaving.pop()
    fleet.leaving = frozenset(leaving)


def _can_spare(core: Core, leaving: frozenset[int]) -> bool:
    """Return whether good nodes take the roles of all these."""
    found = seating(core, leaving)
    new = {seat.node for seat in found.seats.values()} - core.state.seats.nodes
    return not found.unseated and not new & core.state.fleet.avoid


def _leave_out(core: Core, node: int, judged: Judgement) -> None:
    cause = f"left out: {judged.text}"
    drop_node(core, node, Failure(cause, FailureKind.LEFT_OUT, ("node", str(node)), node=node))


def _end_check(core: Core, judged: Mapping[int, Judgement]) -> None:
    """The run was only for this: 0 with as many good nodes as it needs, else 1."""
    state, config = core.state, core.config
    absent = set(range(config.nodes + config.spares)) - judged.keys()
    for node in sorted(absent):
        why = state.fleet.gone.get(node, "did not join in time")
        _emit(core, node, Judgement(Standing.LEFT_OUT, (why,)), None, "")
    good = sum(one.standing is Standing.GOOD for one in judged.values())
    enough = good >= config.nodes
    why = "" if enough else f"not enough nodes: {good} are good, --nodes is {config.nodes}"
    finish(core, 0 if enough else ExitStatus.FAILED, why)


def _not_enough(good: int, config: Config, judged: Mapping[int, Judgement]) -> str:
    bad = [
        f"node {node}: {one.standing}: {one.text}"
        for node, one in sorted(judged.items())
        if one.standing is not Standing.GOOD
    ]
    why = f" ({'; '.join(bad)})" if bad else ""
    return f"not enough nodes: {good} are good, --nodes is {config.nodes}{why}"


def _emit(
    core: Core,
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
    core.emit(Kind.NODE_JUDGED, node=node, **data)
