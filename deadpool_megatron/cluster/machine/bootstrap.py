"""Bootstrap: nodes join and are checked; the first epoch starts once enough are eligible.

Before the first epoch all nodes are judged together. Afterwards a node without a role is compared
with the common facts of the run, when it joins and when it reports its facts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.machine import inputs as ev, state as states, takeover
from deadpool_megatron.cluster.machine.actions import DropNode, Welcome
from deadpool_megatron.cluster.machine.blame import Failure, FinalStatus
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.epoch import barred_nodes, can_drain, decide, seating
from deadpool_megatron.cluster.machine.membership import drop_node, timeout_failure
from deadpool_megatron.cluster.machine.pauses import consider_pause
from deadpool_megatron.cluster.machine.shutdown import finish
from deadpool_megatron.events import Kind
from deadpool_megatron.failures import ExitStatus, FailureKind
from deadpool_megatron.preflight import eligibility
from deadpool_megatron.preflight.eligibility import Eligibility, HostFacts, Judgement, Needs
from deadpool_megatron.preflight.health import NOT_CHECKED, Health

# In these phases no recovery depends on data held only by a node without a role.
_AT_REST = (states.Phase.BOOTSTRAPPING, states.Phase.RUNNING, states.Phase.PAUSING)

# Nodes join.


def node_joined(core: Core, event: ev.NodeJoined) -> None:
    """Accept a node and have its members started, or turn it away."""
    state, node = core.state, event.node
    fleet = state.fleet
    if reason := _refusal(core, event):
        core.refuse(f"join of node {node}", reason, node)
        if node not in fleet.nodes:
            core.act(DropNode(node, reason))
        return
    address = event.host, event.vault_port, event.domain
    entry = states.NodeState(*address, event.memory_bytes, event.returns, facts=event.facts)
    is_quarantined = entry.host_name in fleet.quarantined_hosts
    if is_quarantined and _is_new(event):
        reason = f"excluded: {entry.host_name} was quarantined for the rest of this run"
        core.refuse(f"join of node {node}", reason, node)
        core.act(DropNode(node, reason, excluded=True))
        return
    if reason := _exclusion(core, event):
        core.act(DropNode(node, reason, excluded=True))
        return
    fleet.nodes[node] = entry
    if is_quarantined:  # its data may be needed, but it gets no role
        fleet.quarantined |= {node}
    if event.found is not None:
        state.memory.at_join[node] = event.found
    spare = node not in state.seats.nodes
    core.emit(Kind.NODE_JOINED, node=node, host=event.host, hostname=entry.host_name, spare=spare)
    core.act(Welcome(node, state.record))
    if event.facts is not None and event.facts.health_text.startswith(NOT_CHECKED):
        text = f"--deadpool-health-command: {event.facts.health_text}: the node counts as good"
        core.log("warning", f"node {node}: {text}", node)
    to_start: dict[int, int] = {}
    for local_rank in range(core.config.nproc):
        place = (node, local_rank)
        if local_rank in event.members:
            core.set_member(place, states.MemberStatus.RUNNING, event.members[local_rank])
        else:
            # Under an earlier coordinator, processes had incarnations up to that of the seat.
            was_there = state.record is not None and node in state.record.nodes
            role = state.seats.role_by_place.get(place)
            seated = 0 if role is None else state.seats[role].incarnation
            last = seated if was_there else -1
            to_start[local_rank] = max(last, event.incarnations.get(local_rank, -1)) + 1
    takeover.note_join(core, event)
    if spare:
        _judge_again(core, node, fresh=not event.epoch and event.found is None)
    if to_start and not core.config.check_only:
        core.start_members(node, to_start)
    if isinstance(state.phase_state, states.WaitingSpare):
        decide(core)
    consider_pause(core)


def _refusal(core: Core, event: ev.NodeJoined) -> str:
    """Return why a node cannot join; empty when it can."""
    state, node = core.state, event.node
    if state.phase in states.LAST_PHASES:
        return "the run is ending"
    record = state.record
    if record is not None and event.epoch and node not in record.nodes:
        return f"epoch {record.epoch} continued without this node"
    if node in state.fleet.removed:
        return state.fleet.removed[node]
    return "it is connected already" if node in state.fleet.nodes else ""


def _exclusion(core: Core, event: ev.NodeJoined) -> str:
    """Return why a joining node is excluded; empty if it is not.

    A node with state of the run, or with members that still run, is never turned away.
    """
    agreed = core.state.agreed
    if agreed is None or not _is_new(event):
        return ""
    judged = _judge(core, event.facts, agreed, fresh=True)
    if judged.eligibility is not Eligibility.EXCLUDED:
        return ""
    _emit(core, event.node, judged, event.facts, event.domain)
    return f"excluded: {judged.text}"


def _is_new(event: ev.NodeJoined) -> bool:
    """Return whether a joining node has nothing of the run: neither state nor members."""
    return not event.epoch and not event.members and event.found is None


# The first epoch.


def check_gathered(core: Core) -> None:
    """Decide the first epoch when all planned nodes are judged and run their members. After a
    takeover, continue when all nodes have rejoined.

    Spares get ``connect_seconds`` to join, so that the first record has them; later they are not
    awaited.
    """
    match core.state.phase_state:
        case states.TakingOver() as taking_over if core.state.record is not None:
            takeover.check_rejoined(core, taking_over, core.state.record)
        case states.Bootstrapping() as bootstrapping:
            has_judged = core.state.agreed is not None
            if not has_judged and not _has_enough_nodes(core, bootstrapping.deadline):
                return
            if _judge_once(core, bootstrapping) and not _seated_is_starting(core.state):
                seats = seating(core, core.state.fleet.draining)
                places = [(seat.node, seat.local_rank) for seat in seats.seats.values()]
                if not seats.unseated and all(_runs(core, place) for place in places):
                    decide(core)


def _has_enough_nodes(core: Core, deadline: float) -> bool:
    # The counts are compared first: this runs for every join and every hello.
    fleet, config = core.state.fleet, core.config
    began = deadline - config.settings.start_seconds
    waits_for_spares = core.now < began + config.settings.connect_seconds or config.check_only
    wanted = config.nodes + (config.spares if waits_for_spares else 0)
    count = len(fleet.nodes) + len(fleet.removed)
    return count >= wanted and not fleet.absent(core.state.seats.nodes)


def _seated_is_starting(state: states.State) -> bool:
    """Return whether a member in the place of a seat has not sent its hello yet."""
    places, members = state.seats.role_by_place, state.fleet.members
    return any(members[p].status is states.MemberStatus.STARTING for p in places if p in members)


def _runs(core: Core, place: states.Place) -> bool:
    status = core.state.fleet.members[place].status
    return status in (states.MemberStatus.RUNNING, states.MemberStatus.WARM)


def end_bootstrap(core: Core, bootstrapping: states.Bootstrapping, waited: str) -> None:
    """Continue without the late nodes if spares can replace them, else end the run. ``waited``: the
    subject of the wait, as text."""
    state, fleet = core.state, core.state.fleet
    for node in fleet.absent(state.seats.nodes):
        fleet.removed[node] = "did not join in time"
    if not _judge_once(core, bootstrapping):
        return
    for node in sorted({place[0] for place in fleet.members if not _runs(core, place)}):
        drop_node(core, node, timeout_failure(node, "did not start its members in time"))
    unseated = seating(core, frozenset()).unseated
    if unseated:
        removed = ", ".join(f"node {n}: {reason}" for n, reason in sorted(fleet.removed.items()))
        reason = f"no members for roles {list(unseated)} ({removed or waited})"
        finish(core, FinalStatus(ExitStatus.BAD_INPUT, reason))
    else:
        decide(core)


def _judge_once(core: Core, bootstrapping: states.Bootstrapping) -> bool:
    """Judge the nodes that have joined, if that is not done yet. Return whether the run
    continues."""
    if core.state.agreed is None:
        _judge_all(core)
    return core.state.phase_state is bootstrapping


# Repeated reports of facts.


def facts_reported(core: Core, event: ev.FactsReported) -> None:
    """Note that a node has repeated its health check. Its memory is no longer compared with the
    requirement: by now it may hold copies."""
    fleet = core.state.fleet
    if (entry := fleet.nodes.get(event.node)) is None:
        return
    old_facts, entry.facts = entry.facts, event.facts
    if event.node not in core.state.seats.nodes:
        _judge_again(core, event.node, fresh=False)
    elif event.facts.health is not Health.GOOD and event.node not in fleet.drains:
        _move_away(core, event.node, event.facts, None if old_facts is None else old_facts.health)


def _move_away(core: Core, node: int, facts: HostFacts, before: Health | None) -> None:
    """Have a spare take the roles of a training node as soon as there is a spare; until then the
    node continues as before. If the node is only weak, the roles move only to good nodes.

    Afterwards the node is a spare of last resort. So if the check fails on every node that trains,
    roles move to each node once, not back and forth.
    """
    text = facts.health_text
    if facts.health is Health.OUT:
        cause = f"node {node} is quarantined, its health command says: {text}"
        core.state.fleet.distrust(frozenset({node}))
        core.emit(Kind.NODE_QUARANTINED, node=node, cause=cause, kind=FailureKind.DEVICE_ERROR)
    else:
        if before is not facts.health:
            judged = Judgement(Eligibility.WEAK, (f"its health command says: {text}",))
            _emit(core, node, judged, facts, core.state.fleet.nodes[node].domain)
        if facts.health is Health.UNKNOWN or not can_drain(core, barred_nodes(core.state) | {node}):
            return
    core.state.fleet.drains |= {node}
    consider_pause(core)


def _judge_again(core: Core, node: int, *, fresh: bool) -> None:
    """Judge a node without a role by its latest report. ``fresh``: its memory is still empty."""
    fleet, agreed = core.state.fleet, core.state.agreed
    entry = fleet.nodes[node]
    if agreed is None:
        return
    judged = _judge(core, entry.facts, agreed, fresh=fresh)
    if judged == entry.judged:
        return
    if judged.eligibility is Eligibility.EXCLUDED and core.state.phase not in _AT_REST:
        # The restore or dump may need its data; it will report again later.
        fleet.distrust(frozenset({node}))
        return
    _emit(core, node, judged, entry.facts, entry.domain)
    if judged.eligibility is Eligibility.WEAK:
        fleet.deprioritized |= {node}
    elif judged.eligibility is Eligibility.GOOD and entry.judged.eligibility is Eligibility.WEAK:
        fleet.deprioritized -= {node}
    entry.judged = judged
    if judged.eligibility is Eligibility.EXCLUDED:
        _exclude(core, node, judged)


# Judging.


def _needs(config: states.Config) -> Needs:
    """Return the run's requirements for a node."""
    # With gloo the members of a node may share a GPU, or use none. The value auto is left only in a
    # check, which has not decided yet how GPUs would be used.
    gpus = config.nproc if config.settings.communicator in ("nccl", "auto") else 0
    return Needs(config.nodes, gpus, int(config.settings.shm_gb * 1e9))


def _judge_all(core: Core) -> None:
    """Judge all nodes together, and exclude or drain those that are not good."""
    state, config = core.state, core.config
    facts = {node: entry.facts for node, entry in sorted(state.fleet.nodes.items())}
    if config.settings.check == "off":
        judged = dict.fromkeys(facts, Judgement())
    else:
        judged = eligibility.judge(facts, _needs(config))
    for node, verdict in judged.items():
        # Unless a check was requested, good nodes are not reported.
        if config.check_only or verdict.eligibility is not Eligibility.GOOD:
            _emit(core, node, verdict, facts[node], state.fleet.nodes[node].domain)
        state.fleet.nodes[node].judged = verdict
    excluded = [n for n, verdict in judged.items() if verdict.eligibility is Eligibility.EXCLUDED]
    eligible = [entry for node, entry in facts.items() if node not in excluded]
    state.agreed = eligibility.agree(entry for entry in eligible if entry is not None)
    if config.check_only:
        _end_check(core, judged)
        return
    for node in excluded:
        _exclude(core, node, judged[node])
    _drain_weak(core, judged)
    fleet = state.fleet
    more_may_come = len(fleet.nodes) + len(fleet.removed) < config.nodes + config.spares
    if len(fleet.nodes) < min(config.nodes, len(facts)) and not more_may_come:
        reason = _not_enough(len(fleet.nodes), config, judged)
        finish(core, FinalStatus(ExitStatus.SAVED, reason))


def _judge(
    core: Core, facts: HostFacts | None, agreed: eligibility.CommonFacts, *, fresh: bool
) -> Judgement:
    if core.settings.check == "off":
        return Judgement()
    needs = _needs(core.config)
    needs = needs if fresh else replace(needs, shm_bytes=0)
    return Judgement.of(eligibility.defects_of(facts, agreed, needs))


def _drain_weak(core: Core, judged: Mapping[int, Judgement]) -> None:
    """Have weak nodes give their roles to good spares, as far as there are any."""
    weak = {node for node, verdict in judged.items() if verdict.eligibility is Eligibility.WEAK}
    fleet, seated = core.state.fleet, core.state.seats.nodes
    fleet.deprioritized |= weak
    spares = sum(node not in seated and node not in weak for node in fleet.nodes)
    draining = sorted(weak & seated)[:spares]
    while draining and not can_drain(core, frozenset(draining)):
        draining.pop()
    fleet.draining = frozenset(draining)


def _exclude(core: Core, node: int, judged: Judgement) -> None:
    cause = f"excluded: {judged.text}"
    kind = FailureKind.OTHER_PROGRAM if judged.of_program else FailureKind.EXCLUDED
    drop_node(core, node, Failure.of_node(node, cause, kind))


def _end_check(core: Core, judged: Mapping[int, Judgement]) -> None:
    """End a run that only checks: with status 0 if enough nodes are good, else with 1."""
    state, config = core.state, core.config
    absent = set(range(config.nodes + config.spares)) - judged.keys()
    for node in sorted(absent):
        reason = state.fleet.removed.get(node, "did not join in time")
        _emit(core, node, Judgement(Eligibility.EXCLUDED, (reason,)), None, "")
    good = sum(verdict.eligibility is Eligibility.GOOD for verdict in judged.values())
    enough = good >= config.nodes
    reason = "" if enough else f"not enough nodes: {good} are good, --nodes is {config.nodes}"
    finish(core, FinalStatus(0 if enough else ExitStatus.FAILED, reason))


def _not_enough(good: int, config: states.Config, judged: Mapping[int, Judgement]) -> str:
    bad = [
        f"node {node}: {verdict.eligibility}: {verdict.text}"
        for node, verdict in sorted(judged.items())
        if verdict.eligibility is not Eligibility.GOOD
    ]
    reason = f" ({'; '.join(bad)})" if bad else ""
    return f"not enough nodes: {good} are good, --nodes is {config.nodes}{reason}"


def _emit(core: Core, node: int, judged: Judgement, facts: HostFacts | None, domain: str) -> None:
    data: dict[str, Any] = {
        "standing": str(judged.eligibility),
        "reasons": list(judged.reasons),
        "domain": domain,
        "facts": None if facts is None else facts.to_dict(),
    }
    core.emit(Kind.NODE_JUDGED, node=node, **data)
