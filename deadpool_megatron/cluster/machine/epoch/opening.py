"""An epoch opens, from the durable record until every role has restored."""

from __future__ import annotations

from dataclasses import replace

from immutables import Map

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.actions import Announce
from deadpool_megatron.cluster.machine.epoch.closing import check_done
from deadpool_megatron.cluster.machine.epoch.deciding import decide
from deadpool_megatron.cluster.machine.epoch.ending import finish
from deadpool_megatron.cluster.machine.epoch.pausing import consider_pause, pause
from deadpool_megatron.cluster.machine.gathering import restart
from deadpool_megatron.cluster.machine.inputs import Restored
from deadpool_megatron.cluster.machine.protection import tell_plan
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.fleet import MemberStatus
from deadpool_megatron.cluster.machine.state.phases import Deciding, Opening, Rejoining, Running
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import EpochRecord, Generation, SeatTable


def journal_written(turn: Turn, epoch: int) -> None:
    """A record is durable: announce it, or decide again when it was overtaken."""
    state = turn.state
    match state.doing:
        case Deciding(pending=pending, redecide=None) if epoch == state.epoch:
            announce(turn, pending)
        case Deciding(redecide=Failure(cause=cause)) if epoch == state.epoch:
            turn.state = state._replace(recoveries=state.recoveries.with_cause(cause))
            decide(turn)
        case _:
            turn.refuse("journal", f"epoch {epoch} is not being decided")


def announce(turn: Turn, record: EpochRecord) -> None:
    """The pending record is durable: it is the truth from now on."""
    before = turn.state
    seats = SeatTable(record.seats)
    poisoned = before.blame.poisoned_from
    forgotten = {} if poisoned is None else {"forgotten_from": poisoned}
    recoveries = before.recoveries.spent("decide", turn.now)
    if before.restarted:
        restart.tell(turn, record.restore)
    memory = before.memory
    if record.restore.kind == "memory":
        # Before the inventories are dropped: what the slots say of roles whose members have not
        # told this coordinator yet how they lay out their state.
        memory = memory.with_inherited(turn.config.world_size)
    else:
        memory = replace(memory, inherited=frozenset())
    turn.state = turn.state._replace(
        doing=Opening(turn.now + opening_seconds(turn, record)),
        record=record,
        seats=seats,
        fleet=before.fleet.moved(seats.nodes),
        memory=replace(memory, promised=Map(), found=Map()),
        line=replace(
            before.line,
            kept=record.history.kept,
            # Of an iteration that was thrown away: nothing says so once that is computed anew.
            valid=before.blame.trusted(before.line.valid),
        ),
        blame=replace(before.blame, poisoned_from=None),
        recoveries=recoveries,
        restarted=False,
    )
    turn.act(Announce(record, poisoned))
    turn.emit(
        Kind.EPOCH_DECIDED,
        generation=record.restore.generation.to_list(),
        restore=record.restore.kind,
        segment=record.restore.boundary,
        changes=sorted(r for r, seat in record.seats.items() if before.seats.get(r) != seat),
        seconds=recoveries.current.phases["decide"] if recoveries.current else 0.0,
        **forgotten,
    )
    for place, member in sorted(turn.state.fleet.members.items()):
        if place in seats.role_by_place:
            continue
        if place[0] in before.fleet.leaving:  # it serves as a fresh spare from now on
            turn.kill(place)
        elif member.status in (MemberStatus.STARTING, MemberStatus.RUNNING):
            turn.set_member(place, member.status)  # its time for building counts from here


def opening_seconds(turn: Turn, record: EpochRecord) -> float:
    """Return how long it may take until every role has restored what the record says."""
    settings, members = turn.config.settings, turn.state.fleet.members
    limit = settings.adopt_seconds + settings.rebuild_seconds + settings.restore_seconds
    seated = {(seat.node, seat.slot) for seat in record.seats.values()}
    if any(members[p].status is not MemberStatus.WARM for p in seated if p in members):
        limit += settings.start_seconds
    if record.restore.kind != "memory":  # index files, or a load, take what they take
        limit += settings.first_step_seconds
    return limit


def restored(turn: Turn, event: Restored) -> None:
    """A role has its state; with the last one the epoch opens."""
    role, record, doing = turn.player(event), turn.state.record, turn.state.doing
    if role is None or record is None:
        return
    if record.restore.kind == "initial" and isinstance(doing, Rejoining | Opening):
        if not _begins_alike(turn, doing, event.generation, record):
            return
    elif event.generation != record.restore.generation:
        text = f"role {role} restored {event.generation} instead of {record.restore.generation}"
        kind, signature = FailureKind.CORRUPT_STATE, ("restore", "generation")
        turn.suspect(Failure(text, kind, signature, node=event.node), doubtful=True)
        return
    doing = turn.state.doing
    if isinstance(doing, Rejoining | Opening):
        turn.enter(replace(doing, restored=doing.restored.with_item(role)))
        check_opened(turn)


def _begins_alike(
    turn: Turn, doing: Rejoining | Opening, found: Generation, record: EpochRecord
) -> bool:
    """Take what the roles of an initial start begin with: their program may have loaded a
    checkpoint of its own. Where they have not all loaded the same, the run ends."""
    begins = doing.begins or found
    if found != begins:
        loaded = f"iterations {begins.iteration} and {found.iteration}"
        finish(turn, 1, f"roles loaded different checkpoints, of {loaded}: see what --load names")
        return False
    record = replace(record, restore=replace(record.restore, generation=begins))
    turn.state = turn.state._replace(record=record, doing=replace(doing, begins=begins))
    return True


def check_opened(turn: Turn) -> None:
    """Run when every role has restored; what had to wait for that pauses next."""
    state, opening = turn.state, turn.state.doing
    if not isinstance(opening, Opening) or len(opening.restored) < len(state.seats):
        return
    recovery = state.recoveries.current
    phases = {**recovery.phases, **recovery.reported} if recovery else {}
    warm = state.fleet.members.with_warm(state.seats.role_by_place, turn.now)
    turn.state = state._replace(
        doing=Running(opening.done),
        fleet=replace(state.fleet, members=warm),
        line=replace(state.line, ever_ran=True),
        recoveries=state.recoveries.opened(turn.now),
    )
    if state.record is not None and state.record.restore.kind == "initial":
        for place in sorted(warm.building):  # the data is ready: they can begin
            turn.set_member(place, warm[place].status)
    turn.emit(Kind.EPOCH_OPENED, phases=phases)
    tell_plan(turn)
    check_done(turn)
    if opening.pause is not None:
        pause(turn, opening.pause)
    consider_pause(turn)
