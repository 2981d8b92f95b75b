"""An epoch opens, from the durable record until every role has restored.

Pure functions on a Turn; each sets the phase together with its deadline.
"""

from __future__ import annotations

from dataclasses import replace

from immutables import Map

from deadpool_megatron.cluster.machine.actions import Announce
from deadpool_megatron.cluster.machine.epoch.deciding import decide
from deadpool_megatron.cluster.machine.epoch.ending import check_done
from deadpool_megatron.cluster.machine.epoch.pausing import consider_pause, enter_pause
from deadpool_megatron.cluster.machine.gathering import restart
from deadpool_megatron.cluster.machine.protection import tell_plan
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.cluster.machine.state.phases import Phase
from deadpool_megatron.cluster.machine.state.roster import MemberStatus
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import (
    EpochRecord,
)
from deadpool_megatron.layout.seats import SeatTable


def journal_written(turn: Turn, epoch: int) -> None:
    state = turn.state
    if state.phase is not Phase.DECIDING or epoch != state.epoch:
        turn.refuse("journal", f"epoch {epoch} is not being decided")
    elif state.redecide is None:
        announce(turn)
    else:
        if state.recovery is not None:
            causes = (*state.recovery.causes, state.redecide.cause)
            turn.set(recovery=replace(state.recovery, causes=causes))
        turn.set(pending=None, redecide=None)
        decide(turn)


def announce(turn: Turn) -> None:
    """The pending record is durable: it is the truth from now on."""
    state, record = turn.state, turn.state.pending
    assert record is not None
    seated = {(seat.node, seat.slot) for seat in record.seats.values()}
    moved = state.leaving
    forgotten = {} if state.poisoned_from is None else {"forgotten_from": state.poisoned_from}
    recovery = state.recovery.spend("decide", turn.now) if state.recovery else None
    restart.inherit_layouts(turn, record.restore)
    restart.tell(turn, record.restore)
    turn.set(
        phase=Phase.OPENING,
        deadline=turn.now + opening_seconds(turn, record),
        record=record,
        pending=None,
        seats=SeatTable(record.seats),
        kept=record.history.kept,
        recovery=recovery,
        inventories=Map(),
        found=Map(),
        restarted=False,
        returning=frozenset(),
        restored=PersistentSet(),
        leaving=frozenset(),
        drains=state.drains - moved,
        avoid=state.avoid | moved,
        poisoned_from=None,
    )
    turn.act(Announce(record))
    turn.emit(
        Kind.EPOCH_DECIDED,
        generation=record.restore.generation.to_list(),
        restore=record.restore.kind,
        segment=record.restore.boundary,
        changes=sorted(r for r, seat in record.seats.items() if state.seats.get(r) != seat),
        seconds=recovery.phases["decide"] if recovery else 0.0,
        **forgotten,
    )
    for place, member in sorted(turn.state.members.items()):
        if place in seated:
            continue
        if place[0] in moved:  # a drained node serves as a fresh spare from now on
            turn.kill(place)
        elif member.status in (MemberStatus.STARTING, MemberStatus.RUNNING):
            turn.member(place, member.status)  # its time for building counts from here


def opening_seconds(turn: Turn, record: EpochRecord) -> float:
    """How long it may take until every role has restored what the record says."""
    settings, members = turn.config.settings, turn.state.members
    limit = settings.adopt_seconds + settings.rebuild_seconds + settings.restore_seconds
    seated = {(seat.node, seat.slot) for seat in record.seats.values()}
    if any(members[p].status is not MemberStatus.WARM for p in seated if p in members):
        limit += settings.start_seconds
    if record.restore.kind in ("durable", "dump"):
        limit += settings.first_step_seconds
    return limit


def check_opened(turn: Turn) -> None:
    """Run when every role has restored; what had to wait for that pauses next."""
    state = turn.state
    if state.phase is not Phase.OPENING or len(state.restored) < len(state.seats):
        return
    turn.set(members=state.members.with_warm(state.seats.role_by_place, turn.now))
    recovery = state.recovery
    phases = {**recovery.phases, **recovery.reported} if recovery else {}
    if recovery is not None:
        recovery = replace(recovery, mark=turn.now, opened=True)
    turn.set(phase=Phase.RUNNING, deadline=None, recovery=recovery, ever_ran=True)
    turn.emit(Kind.EPOCH_OPENED, phases=phases)
    tell_plan(turn)
    check_done(turn)
    enter_pause(turn)
    consider_pause(turn)
