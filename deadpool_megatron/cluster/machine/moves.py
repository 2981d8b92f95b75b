"""The moves of the coordinator's state machine from phase to phase. Pure functions on a Turn.

Each move sets the phase together with its deadline, so no wait can be without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from immutables import Map

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine import history, restart, room, timing
from deadpool_megatron.cluster.machine.actions import (
    Announce,
    CloseEpoch,
    DropNode,
    KillMember,
    NoteGone,
    StartMembers,
    WriteRecord,
)
from deadpool_megatron.cluster.machine.bugs import note_failure
from deadpool_megatron.cluster.machine.ending import check_ended, dump, dump_held, finish
from deadpool_megatron.cluster.machine.last_words import LastWords
from deadpool_megatron.cluster.machine.persistent import PersistentSet, without
from deadpool_megatron.cluster.machine.roster import MemberStatus, Place
from deadpool_megatron.cluster.machine.state import (
    LAST_PHASES,
    OPEN_PHASES,
    Failure,
    Phase,
    State,
    Turn,
    matters,
    restore_query,
)
from deadpool_megatron.events import Kind
from deadpool_megatron.layout import schemes
from deadpool_megatron.layout.decision import NoRestore, Seating, SeatingQuery
from deadpool_megatron.layout.placement import missing_copies
from deadpool_megatron.layout.records import EpochRecord, Inventory, NodeAddress, Seat
from deadpool_megatron.layout.schemes import losses_survived
from deadpool_megatron.layout.seats import SeatTable


def close(turn: Turn, failure: Failure, *, silent_seconds: float = 0.0) -> None:
    """Something failed (or has to change): whatever the phase, lead to a new decision."""
    state = turn.state
    match state.phase:
        case phase if phase in OPEN_PHASES:
            _close_open(turn, failure, silent_seconds)
        case Phase.CLOSING:
            if state.recovery is not None:
                causes = (*state.recovery.causes, failure.cause)
                turn.set(recovery=replace(state.recovery, causes=causes))
            check_closed(turn)
        case Phase.DECIDING:
            turn.set(redecide=failure)
        case Phase.WAITING_SPARE:
            decide(turn)
        case Phase.GATHERING if state.record is not None and state.missed is None:
            turn.set(missed=failure)


def save_and_end(turn: Turn, words: LastWords, kind: FailureKind | None = None) -> None:
    """Whatever the phase, close the epoch, save the newest generation, and end with ``words``.
    ``kind``: why the epoch is closed, if not for the failure that ends the run."""
    state = turn.state
    if state.phase in LAST_PHASES or state.last_words is not None:
        return
    turn.set(last_words=words)
    if state.record is None and state.phase is Phase.GATHERING:
        dump(turn)  # nothing was begun
    else:
        close(turn, Failure(words.reason, kind or words.kind or FailureKind.CORRUPT_STATE))


def _close_open(turn: Turn, failure: Failure, silent_seconds: float) -> None:
    state, record = turn.state, turn.state.record
    assert record is not None
    if failure.signature:
        note_failure(turn, failure)
    signs = min(turn.now - silent_seconds, state.suspicion.at if state.suspicion else turn.now)
    if state.recovery is None:
        recovery = timing.begin(
            (failure.cause,), signs, turn.now, state.newest, record.seats, str(failure.kind)
        )
    else:
        recovery = state.recovery.again(failure.cause, turn.now)
    turn.act(CloseEpoch(record.epoch, failure.cause))
    turn.emit(Kind.EPOCH_CLOSED, cause=failure.cause, kind=failure.kind)
    turn.set(
        phase=Phase.CLOSING,
        deadline=turn.now + turn.config.settings.gather_seconds,
        recovery=recovery,
        awaited=PersistentSet(node for node in record.nodes if node in state.nodes),
        inventories=Map(),
        restored=PersistentSet(),
        done=PersistentSet(),
        suspicion=None,
        missed=None,
        pause=None,
    )
    check_closed(turn)


def check_closed(turn: Turn) -> None:
    """Decide when every live node has promised its inventory and no killed process is left."""
    state = turn.state
    if state.phase is not Phase.CLOSING or state.awaited or state.members.killed:
        return
    if state.recovery is not None:
        turn.set(recovery=state.recovery.spend("close", turn.now))
    decide(turn)


def seating(turn: Turn, leaving: frozenset[int]) -> Seating:
    """Who would play which role now."""
    state = turn.state
    return turn.planner.assign_seats(
        SeatingQuery(
            seats=state.seats,
            members={place: member.incarnation for place, member in state.members.items()},
            warm=frozenset(p for p, m in state.members.items() if m.status is MemberStatus.WARM),
            leaving=leaving,
            avoid=state.avoid,
        )
    )


def decide(turn: Turn) -> None:
    """Choose seats and restore from what is known now; immediate, unless a kill is under way."""
    if turn.state.members.killed:
        _wait_for_reaping(turn)
        return
    if turn.state.last_words is not None:
        dump(turn)
        return
    seats = seating(turn, turn.state.leaving)
    if seats.unseated and turn.state.leaving:  # the spare for the drain has gone in the meantime
        turn.set(leaving=frozenset())
        seats = seating(turn, turn.state.leaving)
    state = turn.state
    restore = turn.planner.choose_restore(restore_query(turn, seats.seats))
    if isinstance(restore, NoRestore):
        if state.returning:
            _wait_for_return(turn, restore.reason)
        else:
            dump_held(turn, LastWords(1, _with_scheme(turn, restore.reason)))
        return
    if seats.unseated:
        _wait_for_spare(turn, seats)
        return
    nodes = record_nodes(state, seats.seats)
    if why := room.settle(turn, seats.seats, nodes, restore):
        room.wait_or_end(turn, why, restore)
        return
    record = EpochRecord(
        epoch=state.epoch + 1,
        seats=seats.seats,
        nodes=nodes,
        restore=restore,
        replicas=losses_survived(turn.config.settings, turn.state.protection),
        protection=turn.state.protection,
        emitted_up_to=state.newest,
        fewer_copies=owed_copies(seats.seats, nodes, turn),
        cause="; then ".join(state.recovery.causes) if state.recovery else "start",
        history=history.of_next_epoch(state, restore),
    )
    turn.set(
        phase=Phase.DECIDING,
        # A journal that cannot be written for a while is tried again until then.
        deadline=turn.now + 2 * turn.config.settings.spare_timeout_seconds,
        epoch=record.epoch,
        pending=record,
        redecide=None,
    )
    turn.act(WriteRecord(record))


def record_nodes(state: State, seats: Mapping[int, Seat]) -> dict[int, NodeAddress]:
    """All live nodes as a record names them; who has no seat is a spare."""
    training = {seat.node for seat in seats.values()}
    return {
        node: NodeAddress(known.host, known.vault_port, known.domain, spare=node not in training)
        for node, known in sorted(state.nodes.items())
    }


def owed_copies(
    seats: Mapping[int, Seat], nodes: Mapping[int, NodeAddress], turn: Turn
) -> frozenset[int]:
    """Roles that have fewer copies than wanted if these nodes play them."""
    return missing_copies(
        {role: seat.node for role, seat in seats.items()},
        {node: address.domain for node, address in nodes.items()},
        {node for node, address in nodes.items() if address.spare},
        losses_survived(turn.config.settings, turn.state.protection),
    )


def _with_scheme(turn: Turn, reason: str) -> str:
    """Why nothing can be restored, and the choice that has led to it."""
    if turn.state.gone and schemes.Kind.LOCAL in turn.state.protection.kinds:
        return (
            "--deadpool-protection local keeps the state of a node on that node only, and one was"
            f" lost: {reason}; save checkpoints more often, or protect with buddy or parity"
        )
    return reason


def _wait_for_reaping(turn: Turn) -> None:
    """Whether a slot gets a new process in place is known only when the old one has ended."""
    if turn.state.phase is not Phase.WAITING_SPARE:
        limit = turn.config.settings.gather_seconds
        turn.set(phase=Phase.CLOSING, deadline=turn.now + limit, pending=None, redecide=None)


def _wait_for_spare(turn: Turn, seats: Seating) -> None:
    if turn.state.phase is Phase.WAITING_SPARE:
        return
    turn.set(
        phase=Phase.WAITING_SPARE,
        deadline=turn.now + turn.config.settings.spare_timeout_seconds,
        pending=None,
        redecide=None,
    )
    roles = list(seats.unseated)
    turn.emit(Kind.LOG, level="warning", text=f"roles {roles} wait for a spare node to join")


def _wait_for_return(turn: Turn, reason: str) -> None:
    """What is missing may lie in memory of a host whose agent ended: it can be started again."""
    if turn.state.phase is Phase.WAITING_SPARE:
        return
    limit = turn.config.settings.spare_timeout_seconds
    turn.set(phase=Phase.WAITING_SPARE, deadline=turn.now + limit, pending=None, redecide=None)
    nodes = sorted(turn.state.returning)
    text = f"{reason}: nodes {nodes} have {limit:g} s to come back with what they hold in memory"
    turn.emit(Kind.LOG, level="warning", text=text)


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
            kill(turn, place)
        elif member.status in (MemberStatus.STARTING, MemberStatus.RUNNING):
            turn.member(place, member.status)  # its time for building counts from here


def check_done(turn: Turn) -> None:
    """End the run well when every role has completed its last iteration."""
    running = turn.state.phase in (Phase.RUNNING, Phase.PAUSING)
    if running and len(turn.state.done) == turn.config.world_size:
        finish(turn, 0, "")


def kill(turn: Turn, place: Place, *, hung: bool = False) -> None:
    """Have a member killed, ``hung``: because it does not move; it is replaced when reaped."""
    member = turn.state.members.get(place)
    if member is not None and member.status is not MemberStatus.KILLED:
        turn.member(place, MemberStatus.KILLED)
        turn.act(KillMember(*place, member.incarnation, hung))


def start_members(turn: Turn, node: int, slots: dict[int, int]) -> None:
    """Start processes (slot -> incarnation), told for which role to build."""
    roles = turn.state.seats.role_by_place
    provisional = {
        slot: roles.get((node, slot), turn.config.provisional_role(node, slot)) for slot in slots
    }
    for slot, incarnation in slots.items():
        turn.member((node, slot), MemberStatus.STARTING, incarnation=incarnation)
    turn.act(StartMembers(node, slots, provisional))


def lose_node(turn: Turn, node: int, failure: Failure, *, silent_seconds: float = 0.0) -> None:
    """A node is gone for good, with everything on it."""
    before = turn.state
    if node not in before.nodes:
        return
    turn.set(
        nodes=without(before.nodes, node),
        members=before.members.without_node(node),
        drains=before.drains - {node},
        awaited=before.awaited.without(node),
        inventories=_without(before, node),
        found=without(before.found, node),
    )
    give_up(turn, node, failure.cause, failure.kind)
    if before.phase is Phase.DUMPING:
        dump(turn)
    elif before.phase is Phase.ENDING:
        check_ended(turn)
    elif before.phase in (Phase.CLOSING, Phase.WAITING_SPARE) or _is_needed(before, node):
        close(turn, failure, silent_seconds=silent_seconds)


def give_up(turn: Turn, node: int, cause: str, kind: FailureKind) -> None:
    """A node has no part in the run any more; none comes back under its number."""
    turn.set(gone=turn.state.gone.set(node, cause))
    turn.emit(Kind.NODE_LOST, node=node, cause=cause, kind=kind)
    if turn.state.record is not None and turn.state.phase not in LAST_PHASES:
        turn.act(NoteGone(node, cause))


def _is_needed(state: State, node: int) -> bool:
    record = state.pending if state.phase is Phase.DECIDING else state.record
    return record is not None and matters(state, record, node)


def _without(state: State, node: int) -> Map[int, Inventory]:
    """The inventories that are left; what is on disk already cannot be lost with its node."""
    left = without(state.inventories, node)
    if state.dump is not None and node in state.dump.finished:
        written = state.dump.chains | {state.dump.restore.generation}
        lost = state.held[node]  # it may be one that came after the close
        saved = tuple(holding for holding in lost.holdings if holding.generation in written)
        left = left.set(node, replace(lost, holdings=saved))
    return left


def drop_node(turn: Turn, node: int, failure: Failure) -> None:
    """Put a connected node aside."""
    if node in turn.state.nodes:
        left_out = failure.kind is FailureKind.LEFT_OUT
        turn.act(DropNode(node, failure.cause, left_out=left_out))
        lose_node(turn, node, failure)
