"""Inputs of the coordinator's state machine that come from, or are about, one member process."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.failures import FailureKind, kind_of_end, same_text
from deadpool_megatron.cluster.machine import faults, protection
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.epoch.closing import (
    check_closed,
    close,
    drop_node,
    note_failure,
)
from deadpool_megatron.cluster.machine.epoch.ending import check_done, end_as_found
from deadpool_megatron.cluster.machine.epoch.opening import check_opened
from deadpool_megatron.cluster.machine.epoch.pausing import (
    check_paused,
    consider_pause,
    note_paused,
    pause_later,
)
from deadpool_megatron.cluster.machine.gathering import restart
from deadpool_megatron.cluster.machine.gathering.start import check_gathered
from deadpool_megatron.cluster.machine.state import phases
from deadpool_megatron.cluster.machine.state.blame import Failure, LastWords
from deadpool_megatron.cluster.machine.state.fleet import MemberStatus
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.cluster.run_directory.directory import member_log_name
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.decision import BadPart
from deadpool_megatron.layout.records import Restore
from deadpool_megatron.layout.replaying import REPLAY, suspects
from deadpool_megatron.layout.schemes import recomputes, without_recompute


def handle(turn: Turn, event: ev.OfMember) -> None:
    """Check that the process is the present one of its slot, then pass on to the handler."""
    place = (event.node, event.slot)
    member = turn.state.fleet.members.get(place)
    if member is None or member.incarnation != event.incarnation:
        turn.refuse(_name(event), "not the present process of its slot", event.node)
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
        case ev.OfPlayer():
            _of_player(turn, event)


def _name(event: ev.OfMember) -> str:
    kind = type(event).__name__
    return f"{kind} of member {event.node}.{event.slot}.{event.incarnation}"


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
        turn.refuse(_name(event), f"it does not play role {layout.role}", event.node)
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
        signature = ("layout", str(role))
        close(turn, Failure(cause, FailureKind.PROCESS_CRASH, signature, node=event.node))
        return
    turn.state = turn.state._replace(memory=turn.state.memory.with_layout(layout))
    # Once, with the last one: to reckon what a plan needs takes a second for ten thousand roles.
    if known is None and (why := protection.unfit(turn)):
        close(turn, Failure(why, FailureKind.DRAINED))


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
    if event.exit_code == EXIT_BAD_INPUT and not state.line.ever_ran:
        # The command itself says that its arguments cannot work: no other process will like them.
        end_as_found(turn, LastWords(EXIT_BAD_INPUT, event.last_line or cause))
        return
    if state.heard_epoch is not None and role is not None:
        close(turn, failure)
        if not on_purpose:
            faults.crashed(turn, event.node, failure)
    elif state.phase is phases.Phase.GATHERING and failure.exited:
        slot_too = replace(failure, signature=(*failure.signature, str(place)))
        note_failure(turn, slot_too)
        if turn.state.last_words is not None:
            end_as_found(turn, turn.state.last_words)
    if turn.state.phase in phases.LAST_PHASES:
        return
    # A drained member is killed to serve as a fresh spare: that says nothing about its node.
    _restart(turn, event, failure, counts=role is not None or not ordered)
    if isinstance(turn.state.doing, phases.WaitingSpare) or _is_pending(turn, event):
        close(turn, failure)
    check_closed(turn)


def _is_pending(turn: Turn, event: ev.OfMember) -> bool:
    """Whether a record that is being written has a seat for this slot."""
    match turn.state.doing:
        case phases.Deciding(pending=pending):
            seats = pending.seats.values()
            return any((seat.node, seat.slot) == (event.node, event.slot) for seat in seats)
    return False


def _failure_of(event: ev.MemberLost, cause: str, role: int | None) -> Failure:
    kind = kind_of_end(event.last_line)
    log = member_log_name(event.node, event.slot, event.incarnation)
    evidence = f"role {role} on node {event.node}, log logs/{log}.log"
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


def _of_player(turn: Turn, event: ev.OfPlayer) -> None:
    role, doing, record = _role(turn, event), turn.state.doing, turn.state.record
    if (
        role is None
        or record is None
        or event.epoch != record.epoch
        or not isinstance(doing, phases.Heard)
    ):
        why = "it has no seat" if role is None else f"epoch {event.epoch} is not open"
        turn.refuse(_name(event), why, event.node)
        return
    match event:
        case ev.MemberFault():
            text, kind = f"role {role}: {event.text}", FailureKind.COMMUNICATOR_ERROR
            _suspect(turn, Failure(text, kind, ("fault",), node=event.node))
        case ev.RestoreFailed():
            _restore_failed(turn, event, role, record.restore)
        case ev.Restored(generation=generation):
            if generation != record.restore.generation:
                text = f"role {role} restored {generation} instead of {record.restore.generation}"
                kind, signature = FailureKind.CORRUPT_STATE, ("restore", "generation")
                _suspect(turn, Failure(text, kind, signature, node=event.node), doubtful=True)
            elif isinstance(doing, phases.Rejoining | phases.Opening):
                turn.enter(replace(doing, restored=doing.restored.with_item(role)))
                check_opened(turn)
        case ev.MemberDone():
            turn.enter(replace(doing, done=doing.done.with_item(role)))
            check_done(turn)
            check_paused(turn)
        case ev.Paused(iteration=iteration):
            note_paused(turn, role, iteration)
        case ev.PauseRefused(iteration=iteration):
            pause_later(turn, iteration)


def _suspect(
    turn: Turn,
    failure: Failure,
    bad_parts: frozenset[BadPart] = frozenset(),
    *,
    doubtful: bool = False,
) -> None:
    blame = turn.state.blame.suspecting(failure, turn.now, bad_parts, doubtful=doubtful)
    turn.state = turn.state._replace(blame=blame)


def _restore_failed(turn: Turn, event: ev.RestoreFailed, role: int, restore: Restore) -> None:
    generation = restore.generation
    tried = [*restore.sources.get(role, {}).get(event.part, ())]
    recipe = restore.recipes.get(role)
    decoding = recipe.decodings.get(event.part) if recipe is not None else None
    if decoding is not None:
        # Its parity blocks: no decoding goes without one. What other roles hold of their own is
        # not in doubt for that; where it is damaged, the node that holds it has found out.
        for number, places in decoding.blocks.items():
            if number >= len(decoding.group):
                tried += places
    bad = frozenset(BadPart(one.node, one.role, generation, event.part) for one in tried)
    if recipe is not None:
        bad |= frozenset(suspects(recipe, generation, event.part))
        if event.part == REPLAY:
            _give_up_recomputing(turn, role, event.text)
    # Falling to the next source, generation or checkpoint is progress of a kind.
    what = (event.part, str(role), str(generation) if bad else restore.path)
    cause = f"role {role} cannot be restored: {event.text}"
    failure = Failure(cause, FailureKind.CORRUPT_STATE, ("restore", *what), node=event.node)
    _suspect(turn, failure, bad, doubtful=not bad)


def _give_up_recomputing(turn: Turn, role: int, text: str) -> None:
    """Intact bytes gave another result: whole copies for the rest of the run."""
    chosen = turn.state.protection
    if recomputes(chosen.plan):
        chosen = replace(chosen, plan=without_recompute(chosen.plan))
        turn.state = turn.state._replace(protection=chosen)
        why = "from the next epoch on every iteration is copied whole"
        turn.log("warning", f"role {role}: {text}; {why}")


def _signal_name(number: int) -> str:
    """SIGKILL rather than 9; a number for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
