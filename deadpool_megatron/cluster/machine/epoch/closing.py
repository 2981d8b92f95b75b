"""An epoch is closed: what leads to that, and nodes that go. Pure functions on a Turn.

Each sets the phase together with its deadline, so no wait can be without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from immutables import Map

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.actions import CloseEpoch, DropNode, NoteGone
from deadpool_megatron.cluster.machine.epoch.deciding import decide
from deadpool_megatron.cluster.machine.epoch.ending import check_ended, dump
from deadpool_megatron.cluster.machine.state import recoveries
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet, without
from deadpool_megatron.cluster.machine.state.phases import (
    LAST_PHASES,
    OPEN_PHASES,
    LastWords,
    Phase,
)
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.parity import parity_groups
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import (
    EpochRecord,
    Inventory,
    Restore,
    Source,
)


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
        recovery = recoveries.begin(
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


# So many causes of an end are told.
SHOWN_FAILURES = 3


# The same failure so often in a row without any progress is not worth another try.
_SAME_EXITS = 2

_SAME_FAILURES = 3


def note_failure(turn: Turn, failure: Failure) -> None:
    """Count a failure; have the run saved and ended when the same one repeats without a new
    iteration in between."""
    state = turn.state
    failures = (*(f for f in state.failures if f[0] == state.newest), (state.newest, failure))
    turn.set(failures=failures)
    same = [known for _, known in failures if known.signature == failure.signature]
    repeated = _is_repeated(same, failure)
    if not repeated and len(failures) <= turn.config.settings.restarts_in_place:
        return
    shown = same if repeated else [known for _, known in failures]
    told = [known.with_evidence() for known in shown[-SHOWN_FAILURES:]]
    if failure.kind in (FailureKind.HANG, FailureKind.MEMBER_FROZEN):
        told += state.stacks
    count = f"{len(shown)} times the same failure, so trying again is no use: " if repeated else ""
    reason = f"no progress after iteration {state.newest}: {count}{'; '.join(told)}"
    if turn.state.last_words is None:
        kind = FailureKind.BUG if repeated else failure.kind
        turn.set(last_words=LastWords(1, reason, kind))


def _is_repeated(same: list[Failure], failure: Failure) -> bool:
    """Whether failures with one signature since the last new iteration are the program's fault."""
    if failure.kind is FailureKind.DEVICE_ERROR:
        # A device that fails again is left for another; where that fails alike, it is no device's.
        return len({known.node for known in same}) > 1 or len(same) >= _SAME_FAILURES
    return len(same) >= (_SAME_EXITS if failure.exited else _SAME_FAILURES)


def check_closed(turn: Turn) -> None:
    """Decide when every live node has promised its inventory and no killed process is left."""
    state = turn.state
    if state.phase is not Phase.CLOSING or state.awaited or state.members.killed:
        return
    if state.recovery is not None:
        turn.set(recovery=state.recovery.spend("close", turn.now))
    decide(turn)


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


def drop_node(turn: Turn, node: int, failure: Failure) -> None:
    """Put a connected node aside."""
    if node in turn.state.nodes:
        left_out = failure.kind is FailureKind.LEFT_OUT
        turn.act(DropNode(node, failure.cause, left_out=left_out))
        lose_node(turn, node, failure)


def _is_needed(state: State, node: int) -> bool:
    record = state.pending if state.phase is Phase.DECIDING else state.record
    return record is not None and matters(state, record, node)


def matters(state: State, record: EpochRecord, node: int) -> bool:
    """Whether the loss of ``node`` invalidates the record: a seat, a copy or parity block owed, or
    a source."""
    if any(seat.node == node for seat in record.seats.values()):
        return True
    if not state.is_restored and any(source.node == node for source in _sources(record.restore)):
        return True
    if any(node in group.holders for group in parity_groups(record)):
        return True
    taken_over = state.is_restored or state.phase is Phase.GATHERING
    if taken_over and len(state.layouts) < len(record.seats):
        return node in record.nodes  # it is not known yet whose copies it owes
    placement = CopyPlacement.of_record(record)
    return any(
        node in placement.buddies(role, state.layouts[role].peers if role in state.layouts else ())
        for role in record.seats
    )


def _sources(restore: Restore) -> Iterator[Source]:
    """Every place that a restore may read from."""
    for parts in restore.sources.values():
        for found in parts.values():
            yield from found
    for recipe in restore.recipes.values():
        for decoding in recipe.decodings.values():
            for found in decoding.blocks.values():
                yield from found
        if recipe.replay is not None:
            for parts in recipe.replay.sources.values():
                for found in parts.values():
                    yield from found


def _without(state: State, node: int) -> Map[int, Inventory]:
    """The inventories that are left; what is on disk already cannot be lost with its node."""
    left = without(state.inventories, node)
    if state.dump is not None and node in state.dump.finished:
        written = state.dump.chains | {state.dump.restore.generation}
        lost = state.held[node]  # it may be one that came after the close
        saved = tuple(holding for holding in lost.holdings if holding.generation in written)
        left = left.set(node, replace(lost, holdings=saved))
    return left


def silent(node: int, what: str) -> Failure:
    """A node did not do in time what it was told."""
    signature = ("node", str(node))
    return Failure(f"node {node} {what}", FailureKind.NODE_FROZEN, signature, node=node)
