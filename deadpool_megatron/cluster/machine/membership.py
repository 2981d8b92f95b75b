"""Membership: the loss of nodes, the life of member processes, the quarantine of nodes.

How nodes join and are judged is in bootstrap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.journal.journal import QUARANTINED, REMOVED
from deadpool_megatron.cluster.machine import epoch, inputs as ev, shutdown, state as states
from deadpool_megatron.cluster.machine.actions import DropNode, Note
from deadpool_megatron.cluster.machine.blame import Failure, FinalStatus
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.pauses import consider_pause
from deadpool_megatron.cluster.run_directory.directory import member_log_name
from deadpool_megatron.events import Kind
from deadpool_megatron.failures import (
    OF_THE_HOST,
    ExitStatus,
    FailureKind,
    is_broken_for_good,
    kind_of_end,
    signal_name,
    without_numbers,
)
from deadpool_megatron.layout import records
from deadpool_megatron.layout.descriptions import difference
from deadpool_megatron.layout.placement import CopyPlacement

# A device that failed once may have been hit by a stray particle, and memory may have been short
# for a moment; a second failure shows that it is broken.
_HOST_ERRORS = 2
# This many crashes of a node's processes within this time move its roles to a spare.
_CRASHES = 3
_CRASH_WINDOW_SECONDS = 600.0

_KINDS: Mapping[int | None, FailureKind] = {
    ExitStatus.NO_DEVICE: FailureKind.DEVICE_ERROR,
    ExitStatus.OTHER_PROGRAM: FailureKind.OTHER_PROGRAM,
}

# Nodes.


def node_lost(core: Core, event: ev.NodeLost) -> None:
    """Act on a verdict about a connected node; ignore a node that the machine itself dropped."""
    node, kind = event.node, event.kind
    if (node_state := core.state.fleet.nodes.get(node)) is None:
        return
    if node_state.returns and not event.silent_seconds and kind is FailureKind.NODE_LOST:
        core.state.fleet.returning |= {node}
    failure = Failure.of_node(node, f"node {node}: {event.cause}", kind)
    lose_node(core, node, failure, silent_seconds=event.silent_seconds)


def lose_node(core: Core, node: int, failure: Failure, *, silent_seconds: float = 0.0) -> None:
    """Remove a connected node for good, with everything on it."""
    state, fleet = core.state, core.state.fleet
    is_needed = _is_needed(state, node)
    if isinstance(state.phase_state, states.Closing):
        state.phase_state.awaited.discard(node)
    _forget_memory(state, node)
    del fleet.nodes[node]
    for place in [place for place in fleet.members if place[0] == node]:
        del fleet.members[place]
    fleet.drains -= {node}
    give_up(core, node, failure.cause, failure.kind)
    match state.phase_state:
        case states.Dumping():
            shutdown.dump(core)
        case states.Ending():
            shutdown.check_ended(core)
        case states.Closing() | states.WaitingSpare():
            epoch.close(core, failure, silent_seconds=silent_seconds)
        case _ if is_needed:
            epoch.close(core, failure, silent_seconds=silent_seconds)
        case states.Running(deadline=float()):
            consider_pause(core)  # the run was to grow, perhaps to this node


def give_up(core: Core, node: int, cause: str, kind: FailureKind) -> None:
    """Remove a node from the run, and journal that; no node comes back under its number."""
    core.state.fleet.removed[node] = cause
    core.emit(Kind.NODE_LOST, node=node, cause=cause, kind=kind)
    if core.state.record is not None and core.state.phase not in states.LAST_PHASES:
        core.act(Note(REMOVED, node, {"cause": cause}))


def drop_node(core: Core, node: int, failure: Failure) -> None:
    """Give up a node that may be connected."""
    if node in core.state.fleet.nodes:
        excluded = failure.kind in (FailureKind.EXCLUDED, FailureKind.OTHER_PROGRAM)
        core.act(DropNode(node, failure.cause, excluded=excluded))
        lose_node(core, node, failure)


def timeout_failure(node: int, text: str) -> Failure:
    """Return the failure of a node that did not carry out an order in time."""
    return Failure.of_node(node, f"node {node} {text}", FailureKind.NODE_FROZEN)


def _is_needed(state: states.State, node: int) -> bool:
    phase_state = state.phase_state
    record = phase_state.pending if isinstance(phase_state, states.Deciding) else state.record
    return record is not None and matters(state, record, node)


def block_holders(record: records.EpochRecord) -> frozenset[int]:
    """Return the nodes that keep blocks which are computed from the state of several roles."""
    if not record.protection.kind.combines_roles:
        return frozenset()
    from deadpool_megatron.layout.parity_groups import ParityPlacement

    groups = ParityPlacement.of_record(record).groups
    return frozenset(holder for group in groups for holder in group.holders)


def matters(state: states.State, record: records.EpochRecord, node: int) -> bool:
    """Return whether the loss of ``node`` invalidates the record: the node has a seat, owes a copy
    or parity block, or is a source."""
    if any(seat.node == node for seat in record.seats.values()):
        return True
    if not state.is_restored and any(source.node == node for source in _sources(record.restore)):
        return True
    if node in block_holders(record):
        return True
    taken_over = state.is_restored or isinstance(state.phase_state, states.TakingOver)
    if taken_over and not record.seats.keys() <= state.memory.layouts.keys():
        return node in record.nodes  # it is not known yet which copies the node owes
    return any(node in buddies for buddies in _buddies(state, record).values())


def _buddies(state: states.State, record: records.EpochRecord) -> dict[int, Collection[int]]:
    """Return role -> nodes that owe a copy of its state."""
    placement, layouts = CopyPlacement.of_record(record), state.memory.layouts
    peers = {role: layouts[role].peers if role in layouts else () for role in record.seats}
    return {role: placement.buddies(role, peers[role]) for role in record.seats}


def exposed_roles(state: states.State) -> frozenset[int]:
    """Return the roles with fewer copies than wanted: in the open epoch the roles in its record;
    after a loss, until the recovery is over, also the roles that have lost a copy."""
    record, recovery = state.record, state.recoveries.current
    if record is None:
        return frozenset()
    exposed = record.fewer_copies
    if recovery is None and state.phase in (states.Phase.RUNNING, states.Phase.PAUSING):
        return exposed
    for each_record in (record,) if recovery is None else (record, recovery.record):
        lost = each_record.nodes.keys() - state.fleet.nodes.keys()
        if lost and each_record.protection.kind.combines_roles:
            return frozenset(record.seats)
        exposed |= {
            role
            for role, buddies in _buddies(state, each_record).items()
            if not lost.isdisjoint((each_record.seats[role].node, *buddies))
        }
    return exposed


def _sources(restore: records.Restore) -> Iterator[records.Source]:
    """Yield every place that a restore may read from."""
    for parts in restore.sources.values():
        for places in parts.values():
            yield from places
    for recipe in restore.recipes.values():
        yield from recipe.sources()


def _forget_memory(state: states.State, node: int) -> None:
    """Forget the inventory of a lost node, except for the parts that it has written to disk."""
    lost = state.memory.inventories.get(node)  # from the close, or from a join after it
    state.memory.drop_node(node)
    dumping = state.phase_state
    if not isinstance(dumping, states.Dumping) or lost is None or node not in dumping.finished:
        return
    # Only the extras of this boundary were written; another try may need others.
    boundaries = set(records.BOUNDARIES) - {dumping.restore.boundary}
    others = set(map(records.extras_part, boundaries))
    written_parts = tuple(
        replace(holding, parts=holding.parts - others)
        for holding in lost.holdings
        if holding.generation == dumping.restore.generation
    )
    state.memory.at_close[node] = replace(lost, holdings=written_parts)


# Quarantined nodes.


def move_to_spare(core: Core, node: int, reason: str, kind: FailureKind) -> bool:
    """Have a spare take the roles of the node. Return False if no spare can take all of them."""
    if not _has_better(core, node):
        return False
    core.state.fleet.draining |= {node}
    core.state.fleet.distrust(frozenset({node}))
    cause = f"node {node} is quarantined {reason}"
    core.emit(Kind.NODE_QUARANTINED, node=node, cause=cause, kind=kind)
    return True


def _has_better(core: Core, node: int) -> bool:
    """Return whether all roles of the node can go to a spare that is not quarantined itself."""
    draining = core.state.fleet.draining
    return node not in draining and epoch.can_drain(core, draining | {node})


def quarantine(core: Core, node: int, cause: str, kind: FailureKind | None = None) -> None:
    """Exclude the node from all roles, and its host too, so that it gets none under a new number
    either. The host stays eligible if other nodes run there, or if only its files are wrong."""
    fleet = core.state.fleet
    if (node_state := fleet.nodes.get(node)) is None:
        return
    is_shared = any(
        neighbour.host_name == node_state.host_name and other not in fleet.quarantined
        for other, neighbour in fleet.nodes.items()
        if other != node
    )
    host = "" if is_shared or kind is FailureKind.OTHER_PROGRAM else node_state.host_name
    fleet.quarantined |= {node}
    fleet.quarantined_hosts |= {host} if host else set()
    core.act(Note(QUARANTINED, node, {"cause": cause, "host": host}))


def _device_lost(core: Core, event: ev.MemberLost, failure: Failure) -> None:
    """Quarantine the node of a process whose device or files are unusable. No process replaces it
    there, and the roles of the node move. Without a spare the roles wait, as they would fail again
    on that node."""
    node, fleet = event.node, core.state.fleet
    del fleet.members[event.place]
    if node in fleet.quarantined:
        return
    cause = f"node {node} is quarantined for the rest of the run: {failure.cause}"
    fleet.draining |= {node}
    quarantine(core, node, cause, failure.kind)
    core.emit(Kind.NODE_QUARANTINED, node=node, cause=cause, kind=failure.kind)


def _crashed(core: Core, node: int, failure: Failure) -> None:
    """Note that the crash of a process ended an epoch. When crashes repeat, quarantine the node if
    a spare can take all its roles. The node is not dropped, as its vault may be a source of the
    restore."""
    if core.state.phase in states.LAST_PHASES or node not in core.state.fleet.nodes:
        return
    node_state = core.state.fleet.nodes[node]
    of_host = failure.kind in OF_THE_HOST
    node_state.crashed_at = (*_recent(core, node_state.crashed_at), core.now)
    node_state.host_errors += of_host
    if of_host and node_state.host_errors >= _HOST_ERRORS:
        reason = f"{node_state.host_errors} errors of its device or memory"
    elif len(node_state.crashed_at) >= _CRASHES:
        reason = f"{len(node_state.crashed_at)} crashes within {_CRASH_WINDOW_SECONDS:g} s"
    else:
        return
    move_to_spare(core, node, f"after {reason}, the last: {failure.cause}", failure.kind)


def _recent(core: Core, times: tuple[float, ...]) -> tuple[float, ...]:
    since = core.now - _CRASH_WINDOW_SECONDS
    return tuple(time for time in times if time >= since)


# Members.


def _emit(core: Core, kind: Kind, /, of: ev.OfMember, role: int | None = None, **data: Any) -> None:
    process = {"local_rank": of.local_rank, "incarnation": of.incarnation}
    core.emit(kind, node=of.node, role=role, **process, **data)


def hello(core: Core, event: ev.MemberHello) -> None:
    """Note that the process runs."""
    members = core.state.fleet.members
    member = members[event.place]
    if member.status is states.MemberStatus.STARTING:
        members[event.place] = replace(member, status=states.MemberStatus.RUNNING)
        _emit(core, Kind.MEMBER_STARTED, event, pid=event.pid)


def warm(core: Core, event: ev.MemberWarm) -> None:
    """Note that a member without a seat has built and is parked."""
    member = core.state.fleet.members[event.place]
    if member.status not in states.BUILDING:
        return
    core.set_member(event.place, states.MemberStatus.WARM)
    _emit(core, Kind.MEMBER_WARM, event, seconds=core.now - member.since)
    consider_pause(core)


def registered(core: Core, event: ev.MemberRegistered) -> None:
    """Note the layout of a member that has built; it must match the layout of the role so far."""
    state, memory, layout = core.state, core.state.memory, event.layout
    role = core.role_at(event)
    if role != layout.role or state.reporting_epoch is None or state.record is None:
        core.refuse_of(event, f"it does not play role {layout.role}")
        return
    expected = memory.layouts.get(role := layout.role)
    is_same = expected is None or expected.layout_hash == layout.layout_hash
    if expected is not None and role in memory.inherited:
        if not is_same:
            _end_as_other_model(core, expected, layout)
            return
        memory.inherited -= {role}
    if not is_same and state.record.restore.kind == "memory":
        core.kill(event.place)
        cause = f"the process built for role {role} lays out its state in another way"
        epoch.close(core, Failure(cause, FailureKind.PROCESS_CRASH, ("layout",), node=event.node))
        return
    memory.layouts[role] = layout
    # The program determines the sizes. A lack of memory later on makes a change fail, no more.
    if memory.sizes is None or (state.record.begins and not (state.restarted or state.start)):
        memory.add_sizes(event.sizes)


def _end_as_other_model(core: Core, known: records.RoleLayout, layout: records.RoleLayout) -> None:
    """End the run and keep its slots, as the state in memory is not of the model that a member has
    built. No iteration has been computed by then."""
    reason = (
        f"the state in memory is of another model or other flags: role {layout.role}:"
        f" {difference(known, layout)}; start the run again with the command that it had, or remove"
        " the state ('deadpool clean RUN') and start with another --run-dir"
    )
    final = FinalStatus(ExitStatus.BAD_INPUT, reason, FailureKind.OTHER_PROGRAM)
    shutdown.finish(core, final, keeps_slots=True)


def lost(core: Core, event: ev.MemberLost) -> None:
    """Handle the end of a process: close the epoch, end the run, or start the next incarnation."""
    state, place = core.state, event.place
    status = state.fleet.members[place].status
    ordered = status is states.MemberStatus.KILLED
    role = core.role_at(event)
    detail = f"exit {event.exit_code}" if event.signal is None else signal_name(event.signal)
    cause = f"{event.process} ended: {detail}"
    cause += f" ({event.last_line})" if event.last_line else ""
    failure = failure_of(event, cause, role)
    on_purpose = ordered or event.ordered
    end = {"exit_code": event.exit_code, "signal": event.signal}
    facts: dict[str, Any] = {key: number for key, number in end.items() if number is not None}
    if not on_purpose:
        facts["kind"] = failure.kind
    _emit(core, Kind.MEMBER_LOST, event, role, cause=cause, **facts)
    if state.phase in states.LAST_PHASES:
        return
    begins = not state.lineage.ever_ran and not state.survived
    if event.exit_code == ExitStatus.BAD_INPUT and begins:
        # The command itself reports that its arguments cannot work: no process could use them.
        shutdown.abort_start(core, FinalStatus(ExitStatus.BAD_INPUT, event.last_line or cause))
        return
    is_first = status is states.MemberStatus.STARTING and event.incarnation == 0
    is_other = event.exit_code == ExitStatus.OTHER_PROGRAM
    cannot_begin = event.exit_code == ExitStatus.BAD_INPUT and is_first and state.lineage.ever_ran
    if cannot_begin or (is_other and not _is_needed(state, event.node)):
        # The program runs on other nodes; this node, which came later, lacks something it needs.
        text = f"excluded: its program cannot begin there: {event.last_line or cause}"
        kind = FailureKind.OTHER_PROGRAM if is_other else FailureKind.EXCLUDED
        drop_node(core, event.node, Failure.of_node(event.node, text, kind))
        return
    device_is_lost = _is_broken(event) and not on_purpose
    if device_is_lost:
        if begins and _cannot_begin_without(core, event.node):
            final = FinalStatus(ExitStatus.BAD_INPUT, failure.cause, failure.kind)
            shutdown.abort_start(core, final)
            return
        _device_lost(core, event, failure)
    by_itself = f"the program ended: {event.last_line or cause} [{failure.evidence}]"
    if event.exit_code == 0 and not on_purpose and role is not None and begins:
        shutdown.abort_start(core, FinalStatus(ExitStatus.BAD_INPUT, by_itself))
        return
    if state.reporting_epoch is not None and role is not None:
        if event.exit_code in (0, ExitStatus.EXTRAS_OUTGROWN) and not on_purpose:
            # Any other process in its place would end in the same way.
            reason = event.last_line or cause if event.exit_code else by_itself
            epoch.save_and_end(core, FinalStatus(event.exit_code or 1, reason, failure.kind))
        else:
            epoch.close(core, failure)
        if not on_purpose and not device_is_lost and not state.is_changing:
            _crashed(core, event.node, failure)
    elif (
        state.phase is states.Phase.BOOTSTRAPPING
        and failure.exited
        and not device_is_lost
        and not state.survived
    ):
        with_place = replace(failure, signature=(*failure.signature, str(place)))
        epoch.note_failure(core, with_place)
        if state.final is not None:
            shutdown.abort_start(core, state.final)
    if state.phase in states.LAST_PHASES:
        return
    if not device_is_lost:
        # A drained member is killed to serve as a fresh spare: its node is not at fault.
        _restart(core, event, failure, counts=role is not None or not ordered)
    if isinstance(state.phase_state, states.WaitingSpare) or _is_pending(core, event):
        epoch.close(core, failure)
    epoch.check_closed(core)


def _cannot_begin_without(core: Core, node: int) -> bool:
    """Return whether no other node can take the roles of the node, and no node is awaited."""
    fleet, config = core.state.fleet, core.config
    if node in fleet.quarantined or node not in core.state.seats.nodes:
        return False
    all_came = len(fleet.nodes) + len(fleet.removed) >= config.nodes + config.spares
    return all_came and not _has_better(core, node)


def _is_broken(event: ev.MemberLost) -> bool:
    return is_broken_for_good(event.exit_code, event.last_line)


def _is_pending(core: Core, event: ev.OfMember) -> bool:
    """Return whether a record that is being written has a seat in the place of this member."""
    deciding = core.state.phase_state
    return isinstance(deciding, states.Deciding) and any(
        (seat.node, seat.local_rank) == event.place for seat in deciding.pending.seats.values()
    )


def failure_of(event: ev.MemberLost, cause: str, role: int | None) -> Failure:
    """Return the failure that the end of a process is for the epoch in which it has ``role``."""
    kind = _KINDS.get(event.exit_code) or kind_of_end(event.last_line)
    log = member_log_name(event.node, event.local_rank, event.incarnation)
    seat = "" if role is None else f"role {role} on node {event.node}, "
    evidence = f"{seat}log logs/{log}.log"
    signature: tuple[str, ...] = ("signal", str(event.signal), str(role))
    if _is_broken(event):
        # Without a signature, as the program is never to blame for broken devices; each of them
        # takes a node from the run.
        return Failure(cause, kind, (), True, event.node, evidence)
    if event.signal is None:
        signature = ("exit", str(event.exit_code), without_numbers(event.last_line))
    return Failure(cause, kind, signature, event.signal is None, event.node, evidence)


def _restart(core: Core, event: ev.MemberLost, failure: Failure, *, counts: bool) -> None:
    """Start the next incarnation in the same place; after too many restarts, drop the node.
    ``counts``: whether this restart is counted."""
    node = core.state.fleet.nodes[event.node]
    if counts:
        node.restarts += 1
        node.restarted_at = (*_recent(core, node.restarted_at), core.now)
    restarts = len(node.restarted_at)
    # While the state has yet to be saved, the data of the node is needed.
    if restarts > core.settings.restarts_in_place and core.state.final is None:
        cause = f"node {event.node} is given up after {restarts - 1} restarts: {failure.cause}"
        drop_node(core, event.node, Failure.of_node(event.node, cause, failure.kind))
    else:
        core.start_members(event.node, {event.local_rank: event.incarnation + 1})


def suspected(core: Core, event: ev.MemberSuspected) -> None:
    """Kill and replace a process that is frozen or unreachable."""
    role = core.role_at(event)
    core.kill(event.place)
    if (role is not None and core.state.reporting_epoch is not None) or _is_pending(core, event):
        signature = ("suspected", str(role))
        failure = Failure(event.cause, FailureKind.MEMBER_FROZEN, signature, node=event.node)
        epoch.close(core, failure, silent_seconds=event.silent_seconds)


def check_members(core: Core) -> None:
    """Check that killed processes are reaped, and spares become warm, in time."""
    settings, state, members = core.settings, core.state, core.state.fleet.members
    if state.phase in states.LAST_PHASES:
        return  # no process is needed any more, only the data of its node
    for place in state.fleet.places_with(states.MemberStatus.KILLED):
        if place in members and core.now - members[place].since > settings.close_seconds:
            drop_node(core, place[0], timeout_failure(place[0], "cannot end a killed process"))
    if state.open_epoch is None or state.record is None:
        return
    if state.phase is states.Phase.OPENING and state.record.restore.kind == "initial":
        return  # spares wait until the data is ready
    for place in state.fleet.places_with(*states.BUILDING):
        late = core.now - members[place].since > settings.start_seconds
        if late and place not in state.seats.role_by_place:
            core.kill(place)
