"""An epoch is closed: what leads to that, and nodes that go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from immutables import Map

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.actions import CloseEpoch, DropNode, NoteGone
from deadpool_megatron.cluster.machine.epoch.deciding import decide
from deadpool_megatron.cluster.machine.epoch.ending import EXIT_SAVED, check_ended, dump, finish
from deadpool_megatron.cluster.machine.state import phases
from deadpool_megatron.cluster.machine.state.blame import Failure, LastWords
from deadpool_megatron.cluster.machine.state.memory import Memory
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout import schemes
from deadpool_megatron.layout.part_kinds import BOUNDARIES, extras_part
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import EpochRecord, Inventory, Restore, Source


def close(turn: Turn, failure: Failure, *, silent_seconds: float = 0.0) -> None:
    """Something failed (or has to change): whatever the phase, lead to a new decision."""
    state = turn.state
    match state.doing:
        case phases.Opening() | phases.Running() | phases.Pausing() if state.record is not None:
            _close_open(turn, state.record, failure, silent_seconds)
        case phases.Closing():
            turn.state = state._replace(recoveries=state.recoveries.with_cause(failure.cause))
            check_closed(turn)
        case phases.Deciding() as deciding:
            turn.enter(replace(deciding, redecide=failure))
        case phases.WaitingSpare():
            decide(turn)
        case phases.Rejoining(missed=None) as rejoining:
            turn.enter(replace(rejoining, missed=failure))


def save_and_end(turn: Turn, words: LastWords, kind: FailureKind | None = None) -> None:
    """Whatever the phase, close the epoch, save the newest generation, and end with ``words``.
    ``kind``: why the epoch is closed, if not for the failure that ends the run."""
    state = turn.state
    if state.phase in phases.LAST_PHASES or state.last_words is not None:
        return
    turn.state = state._replace(last_words=words)
    if isinstance(state.doing, phases.Gathering):
        dump(turn)  # nothing was begun
    else:
        close(turn, Failure(words.reason, kind or words.kind or FailureKind.CORRUPT_STATE))


def check_done(turn: Turn) -> None:
    """End the run when every role has completed its last iteration; what the program could not save
    is saved for it."""
    match turn.state.doing:
        case phases.Running(done=done) | phases.Pausing(done=done):
            early, unsaved = turn.state.early, turn.state.unsaved
            how = f"ended early at {early}" if early else "training is complete"
            if len(done) < turn.config.world_size:
                return
            if unsaved:
                words = LastWords(EXIT_SAVED, f"{how}, its checkpoint was not written: {unsaved}")
                save_and_end(turn, words, FailureKind.DRAINED)
            elif early:
                finish(turn, EXIT_SAVED, how, is_early=True)
            else:
                finish(turn, 0, "")


def _close_open(turn: Turn, record: EpochRecord, failure: Failure, silent_seconds: float) -> None:
    if failure.signature:
        note_failure(turn, failure)
    state, suspicion = turn.state, turn.state.blame.suspicion
    signs = min(turn.now - silent_seconds, suspicion.at if suspicion else turn.now)
    turn.act(CloseEpoch(record.epoch, failure.cause))
    turn.emit(Kind.EPOCH_CLOSED, cause=failure.cause, kind=failure.kind)
    turn.state = state._replace(
        doing=phases.Closing(
            turn.now + turn.config.settings.gather_seconds,
            PersistentSet(node for node in record.nodes if node in state.fleet.nodes),
        ),
        recoveries=state.recoveries.closed(failure, signs, turn.now, state.line.newest, record),
        memory=replace(state.memory, promised=Map()),
        blame=replace(state.blame, suspicion=None),
        line=replace(state.line, seen=False),
    )
    check_closed(turn)


def note_failure(turn: Turn, failure: Failure) -> None:
    """Count a failure; have the run saved and ended when the same one repeats without a new
    iteration in between."""
    state = turn.state
    blame = state.blame.with_failure(state.reached, failure)
    words = state.last_words or blame.crash_loop(turn.config.settings.restarts_in_place)
    turn.state = state._replace(blame=blame, last_words=words)


def check_closed(turn: Turn) -> None:
    """Decide when every live node has promised its inventory and no killed process is left."""
    match turn.state.doing:
        case phases.Closing(awaited=awaited) if not awaited and not turn.state.fleet.members.killed:
            recoveries = turn.state.recoveries.spent("close", turn.now)
            turn.state = turn.state._replace(recoveries=recoveries)
            decide(turn)


def note_inventory(turn: Turn, inventory: Inventory) -> None:
    """A node's vault has closed the epoch and promises what it holds."""
    state = turn.state
    match state.doing:
        case _ if state.record is None or inventory.epoch != state.record.epoch:
            turn.refuse("inventory", f"of epoch {inventory.epoch}", inventory.node)
        case phases.Rejoining() | phases.Opening() | phases.Running() | phases.Pausing():
            # The order of an earlier coordinator that the agent came to only now.
            cause = f"node {inventory.node} has closed epoch {inventory.epoch} already"
            close(turn, Failure(cause, FailureKind.COORDINATOR))
        case phases.Closing(awaited=awaited) as closing if inventory.node in awaited:
            left = replace(closing, awaited=awaited.without(inventory.node))
            turn.state = state._replace(doing=left, memory=state.memory.with_promise(inventory))
            check_closed(turn)


def lose_node(turn: Turn, node: int, failure: Failure, *, silent_seconds: float = 0.0) -> None:
    """A node is gone for good, with everything on it."""
    before = turn.state
    if node not in before.fleet.nodes:
        return
    doing = before.doing
    if isinstance(doing, phases.Closing):
        doing = replace(doing, awaited=doing.awaited.without(node))
    turn.state = before._replace(
        doing=doing, fleet=before.fleet.without_node(node), memory=_without(before, node)
    )
    give_up(turn, node, failure.cause, failure.kind)
    match doing:
        case phases.Dumping():
            dump(turn)
        case phases.Ending():
            check_ended(turn)
        case _ if isinstance(doing, phases.Closing | phases.WaitingSpare) or _is_needed(
            before, node
        ):
            close(turn, failure, silent_seconds=silent_seconds)


def give_up(turn: Turn, node: int, cause: str, kind: FailureKind) -> None:
    """A node has no part in the run any more; none comes back under its number."""
    turn.state = turn.state._replace(fleet=turn.state.fleet.given_up([node], cause))
    turn.emit(Kind.NODE_LOST, node=node, cause=cause, kind=kind)
    if turn.state.record is not None and turn.state.phase not in phases.LAST_PHASES:
        turn.act(NoteGone(node, cause))


def drop_node(turn: Turn, node: int, failure: Failure) -> None:
    """Put a connected node aside."""
    if node in turn.state.fleet.nodes:
        left_out = failure.kind is FailureKind.LEFT_OUT
        turn.act(DropNode(node, failure.cause, left_out=left_out))
        lose_node(turn, node, failure)


def _is_needed(state: State, node: int) -> bool:
    record = state.doing.pending if isinstance(state.doing, phases.Deciding) else state.record
    return record is not None and matters(state, record, node)


def matters(state: State, record: EpochRecord, node: int) -> bool:
    """Return whether the loss of ``node`` invalidates the record: a seat, a copy or parity block
    owed, or a source."""
    if any(seat.node == node for seat in record.seats.values()):
        return True
    if not state.is_restored and any(source.node == node for source in _sources(record.restore)):
        return True
    if record.protection.kind is schemes.Kind.PARITY:
        from deadpool_megatron.layout.parity_groups import parity_groups

        if any(node in group.holders for group in parity_groups(record)):
            return True
    taken_over = state.is_restored or isinstance(state.doing, phases.Rejoining)
    if taken_over and len(state.memory.layouts) < len(record.seats):
        return node in record.nodes  # it is not known yet whose copies it owes
    placement, layouts = CopyPlacement.of_record(record), state.memory.layouts
    peers = {role: layouts[role].peers if role in layouts else () for role in record.seats}
    return any(node in placement.buddies(role, peers[role]) for role in record.seats)


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


def _without(state: State, node: int) -> Memory:
    """The inventories that are left; what is on disk already cannot be lost with its node."""
    left = state.memory.without_node(node)
    match state.doing:
        case phases.Dumping(finished=finished, chains=chains, restore=restore) if node in finished:
            lost = state.memory.held[node]  # it may be one that came after the close
            written = chains | {restore.generation}
            # Of extras only those of one boundary, which another try may not be for.
            left_out = {extras_part(one) for one in BOUNDARIES if one != restore.boundary}
            saved = tuple(
                replace(holding, parts=holding.parts - left_out)
                for holding in lost.holdings
                if holding.generation in written
            )
            left = left.with_promise(replace(lost, holdings=saved))
    return left


def silent(node: int, what: str) -> Failure:
    """A node did not do in time what it was told."""
    signature = ("node", str(node))
    return Failure(f"node {node} {what}", FailureKind.NODE_FROZEN, signature, node=node)
