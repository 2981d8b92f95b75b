"""The life of member processes: one comes up, is ready, says how it lays out its state, ends."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.failures import (
    EXIT_EXTRAS_OUTGROWN,
    EXIT_NO_DEVICE,
    FailureKind,
    is_broken_for_good,
    kind_of_end,
    same_text,
)
from deadpool_megatron.cluster.machine import faults, protection
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.epoch.closing import (
    check_closed,
    close,
    drop_node,
    note_failure,
    save_and_end,
)
from deadpool_megatron.cluster.machine.epoch.ending import end_as_found
from deadpool_megatron.cluster.machine.epoch.pausing import (
    consider_pause,
)
from deadpool_megatron.cluster.machine.gathering import restart
from deadpool_megatron.cluster.machine.gathering.start import check_gathered
from deadpool_megatron.cluster.machine.state import phases
from deadpool_megatron.cluster.machine.state.blame import Failure, LastWords
from deadpool_megatron.cluster.machine.state.fleet import MemberStatus
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.cluster.run_directory.directory import member_log_name
from deadpool_megatron.events import Kind


def handle(turn: Turn, event: ev.OfMember) -> None:
    """Pass on to the handler what comes from, or is about, the present process of a slot."""
    if not turn.is_present(event):
        return
    match event:
        case ev.MemberHello():
            _hello(turn, event)
        case ev.MemberWarm():
            _warm(turn, event)
        case ev.MemberRegistered():
            _registered(turn, event)
        case ev.MemberLost():
            _lost(turn, event)
        case ev.MemberSuspected():
            _suspected(turn, event)


def _tell(turn: Turn, what: Kind, /, of: ev.OfMember, role: int | None = None, **data: Any) -> None:
    process = {"slot": of.slot, "incarnation": of.incarnation}
    turn.emit(what, node=of.node, role=role, **process, **data)


def _role(turn: Turn, event: ev.OfMember) -> int | None:
    return turn.state.role_at(event.node, event.slot, event.incarnation)


def _hello(turn: Turn, event: ev.MemberHello) -> None:
    place = (event.node, event.slot)
    if turn.state.fleet.members[place].status is MemberStatus.STARTING:
        started = turn.state.fleet.members[place]
        running = replace(started, status=MemberStatus.RUNNING)
        turn.state = turn.state._replace(fleet=turn.state.fleet.with_member(place, running))
        _tell(turn, Kind.MEMBER_STARTED, event, pid=event.pid)
        check_gathered(turn)


# What a command answers that was given bad arguments, as argparse does.
EXIT_BAD_INPUT = 2


def _warm(turn: Turn, event: ev.MemberWarm) -> None:
    place = (event.node, event.slot)
    member = turn.state.fleet.members[place]
    if member.status not in (MemberStatus.STARTING, MemberStatus.RUNNING):
        return
    turn.set_member(place, MemberStatus.WARM)
    _tell(turn, Kind.MEMBER_WARM, event, seconds=turn.now - member.since)
    consider_pause(turn)


def _registered(turn: Turn, event: ev.MemberRegistered) -> None:
    state, layout = turn.state, event.layout
    role = _role(turn, event)
    if role != layout.role or state.heard_epoch is None or state.record is None:
        turn.refuse_of(event, f"it does not play role {layout.role}")
        return
    if role in state.memory.inherited and restart.refuses(turn, layout):
        return
    known = state.memory.layouts.get(role)
    if (
        known is not None
        and known.layout_hash != layout.layout_hash
        and state.record.restore.kind == "memory"
    ):
        turn.kill((event.node, event.slot))
        cause = f"the process built for role {role} lays out its state in another way"
        signature = ("layout",)
        close(turn, Failure(cause, FailureKind.PROCESS_CRASH, signature, node=event.node))
        return
    turn.state = turn.state._replace(memory=turn.state.memory.with_layout(layout))
    # Once, with the last one: to reckon what a plan needs takes a second for ten thousand roles.
    if known is None and (why := protection.unfit(turn)):
        close(turn, Failure(why, FailureKind.DRAINED))
    if len(turn.state.memory.layouts) >= len(state.seats):
        check_gathered(turn)


def _lost(turn: Turn, event: ev.MemberLost) -> None:
    state, place = turn.state, (event.node, event.slot)
    ordered = state.fleet.members[place].status is MemberStatus.KILLED
    role = _role(turn, event)
    how = f"exit {event.exit_code}" if event.signal is None else _signal_name(event.signal)
    cause = f"member {event.node}.{event.slot}.{event.incarnation} ended: {how}"
    cause += f" ({event.last_line})" if event.last_line else ""
    failure = _failure_of(event, cause, role)
    on_purpose = ordered or event.ordered
    end = {"exit_code": event.exit_code, "signal": event.signal}
    facts: dict[str, Any] = {key: number for key, number in end.items() if number is not None}
    if not on_purpose:
        facts["kind"] = failure.kind
    _tell(turn, Kind.MEMBER_LOST, event, role, cause=cause, **facts)
    if state.phase in phases.LAST_PHASES:
        return
    begins = not state.line.ever_ran and not state.survived
    if event.exit_code == EXIT_BAD_INPUT and begins:
        # The command itself says that its arguments cannot work: no other process will like them.
        end_as_found(turn, LastWords(EXIT_BAD_INPUT, event.last_line or cause))
        return
    device_is_lost = _is_broken(event) and not on_purpose
    if device_is_lost:
        if begins and _is_needed(turn, event.node):
            end_as_found(turn, LastWords(EXIT_BAD_INPUT, failure.cause, failure.kind))
            return
        faults.device_lost(turn, place, failure)
    by_itself = f"the program ended by itself: {event.last_line or cause} [{failure.evidence}]"
    if event.exit_code == 0 and not on_purpose and role is not None and begins:
        end_as_found(turn, LastWords(EXIT_BAD_INPUT, by_itself))
        return
    if state.heard_epoch is not None and role is not None:
        if event.exit_code in (0, EXIT_EXTRAS_OUTGROWN) and not on_purpose:
            # Any other process in its place would end like that as well.
            why = event.last_line or cause if event.exit_code else by_itself
            save_and_end(turn, LastWords(event.exit_code or 1, why, failure.kind))
        else:
            close(turn, failure)
        if not on_purpose and not device_is_lost:
            faults.crashed(turn, event.node, failure)
    elif device_is_lost:
        check_gathered(turn)
    elif state.phase is phases.Phase.GATHERING and failure.exited and not state.survived:
        slot_too = replace(failure, signature=(*failure.signature, str(place)))
        note_failure(turn, slot_too)
        if turn.state.last_words is not None:
            end_as_found(turn, turn.state.last_words)
    if turn.state.phase in phases.LAST_PHASES:
        return
    if not device_is_lost:
        # A drained member is killed to serve as a fresh spare: that says nothing about its node.
        _restart(turn, event, failure, counts=role is not None or not ordered)
    if isinstance(turn.state.doing, phases.WaitingSpare) or _is_pending(turn, event):
        close(turn, failure)
    check_closed(turn)


def _is_needed(turn: Turn, node: int) -> bool:
    """Return whether the run cannot begin without this node: no other takes its roles, and none
    is awaited that could."""
    fleet, config = turn.state.fleet, turn.config
    if node in fleet.wrong or node not in turn.state.seats.nodes:
        return False
    all_came = len(fleet.nodes) + len(fleet.gone) >= config.nodes + config.spares
    return all_came and not faults.has_better(turn, node)


def _is_broken(event: ev.MemberLost) -> bool:
    return is_broken_for_good(event.exit_code, event.last_line)


def _is_pending(turn: Turn, event: ev.OfMember) -> bool:
    """Return whether a record that is being written has a seat for this slot."""
    match turn.state.doing:
        case phases.Deciding(pending=pending):
            seats = pending.seats.values()
            return any((seat.node, seat.slot) == (event.node, event.slot) for seat in seats)
    return False


def _failure_of(event: ev.MemberLost, cause: str, role: int | None) -> Failure:
    gone = event.exit_code == EXIT_NO_DEVICE
    kind = FailureKind.DEVICE_ERROR if gone else kind_of_end(event.last_line)
    log = member_log_name(event.node, event.slot, event.incarnation)
    evidence = f"role {role} on node {event.node}, log logs/{log}.log"
    if _is_broken(event):
        # However often devices break, the program is not to blame: each takes a node from the run.
        return Failure(cause, kind, (), True, event.node, evidence)
    if event.signal is None:
        signature = ("exit", str(event.exit_code), same_text(event.last_line))
        return Failure(cause, kind, signature, True, event.node, evidence)
    signature = ("signal", str(event.signal), str(role))
    return Failure(cause, kind, signature, False, event.node, evidence)


def _restart(turn: Turn, event: ev.MemberLost, failure: Failure, *, counts: bool) -> None:
    """The next incarnation at once, in the same place; too many of them, and the node goes."""
    node = turn.state.fleet.nodes[event.node]
    if counts:
        node = faults.with_restart(turn, node)
        turn.state = turn.state._replace(fleet=turn.state.fleet.with_node(event.node, node))
    restarts = len(node.restarted_at)
    # What a node holds is wanted as long as the state is not saved.
    if restarts > turn.config.settings.restarts_in_place and turn.state.last_words is None:
        cause = f"node {event.node} is given up after {restarts - 1} restarts: {failure.cause}"
        signature = ("node", str(event.node))
        drop_node(turn, event.node, Failure(cause, failure.kind, signature, node=event.node))
    else:
        turn.start_members(event.node, {event.slot: event.incarnation + 1})


def _suspected(turn: Turn, event: ev.MemberSuspected) -> None:
    role = _role(turn, event)
    turn.kill((event.node, event.slot))
    if (role is not None and turn.state.heard_epoch is not None) or _is_pending(turn, event):
        failure = Failure(
            event.cause, FailureKind.MEMBER_FROZEN, ("suspected", str(role)), node=event.node
        )
        close(turn, failure, silent_seconds=event.silent_seconds)


def _signal_name(number: int) -> str:
    """SIGKILL rather than 9; a number for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
