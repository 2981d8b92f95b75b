"""Pauses, in which members stand still at one iteration: before a drain, other protection, missing
copies, the dump at the end. All that was computed is committed then; the close that follows loses
nothing."""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.actions import Pause
from deadpool_megatron.cluster.machine.epoch.closing import check_done, close
from deadpool_megatron.cluster.machine.epoch.deciding import (
    drained,
    owed_copies,
    record_nodes,
    seating,
)
from deadpool_megatron.cluster.machine.inputs import MemberDone, Paused, PauseRefused
from deadpool_megatron.cluster.machine.protection import pause_cause
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.cluster.machine.state.phases import (
    Opening,
    PauseOrder,
    Pausing,
    Phase,
    Rejoining,
    Running,
)
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.layout.cadence import next_due

# Of the time that is left to a run: the rest is for the dump that follows.
_SHARE_OF_PAUSE = 0.2


def consider_pause(turn: Turn) -> None:
    """Pause the running job when a wanted drain, or missing copies, can now be served."""
    state, record = turn.state, turn.state.record
    if not isinstance(state.doing, Running) or record is None or state.blame.suspicion is not None:
        return
    for node in sorted(state.fleet.drains & state.seats.nodes):
        if not seating(turn, drained(state) | {node}).unseated:
            _pause_next(turn, f"drain of node {node}", frozenset({node}))
            return
    if state.protection.plan != record.protection:
        _pause_next(turn, pause_cause(state), frozenset())
        return
    if not record.fewer_copies:
        return
    if record.fewer_copies - owed_copies(record.seats, record_nodes(state, record.seats), turn):
        _pause_next(turn, "a new node can hold the missing copies", frozenset())


def pause_for_dump(turn: Turn, reason: str, seconds: float | None) -> bool:
    """Have all that is computed committed before the epoch is closed for a dump; False where
    nobody trains. ``seconds``: see DumpRequested; a part of them is spent on it.
    """
    state = turn.state
    if state.phase is Phase.RUNNING and state.blame.suspicion is None:
        _pause_next(turn, reason, frozenset())
    shorten_pause(turn, seconds)
    return turn.state.phase is not state.phase or state.phase is Phase.PAUSING


def shorten_pause(turn: Turn, seconds: float | None) -> None:
    """Only so much is left for the pause under way, if there is one, and for the dump after it."""
    pausing = turn.state.doing
    if isinstance(pausing, Pausing) and seconds is not None:
        limit = turn.now + _SHARE_OF_PAUSE * seconds
        turn.enter(replace(pausing, deadline=min(pausing.deadline, limit)))


def pause(turn: Turn, order: PauseOrder) -> None:
    """Have all members stand still, if the epoch runs."""
    running, record = turn.state.doing, turn.state.record
    if isinstance(running, Running) and record is not None:
        limit = turn.config.settings.hang_seconds * record.protection.every
        turn.enter(Pausing(turn.now + limit, order, running.done))
        turn.act(Pause(record.epoch, order.iteration))
        check_paused(turn)


def _pause_next(turn: Turn, cause: str, leaving: frozenset[int]) -> None:
    iteration = _boundary_after(turn.state, turn.state.reached)
    pause(turn, PauseOrder(iteration, cause, leaving))


def _boundary_after(state: State, iteration: int) -> int:
    """One that no role has reached yet, and whose generation is protected: nothing is lost."""
    every = 1 if state.record is None else state.record.protection.every
    return next_due(iteration + 2, every)


def note_done(turn: Turn, event: MemberDone) -> None:
    """A role has completed its last iteration: nobody waits for it to pause."""
    role, doing = turn.player(event), turn.state.doing
    if role is not None and isinstance(doing, Rejoining | Opening | Running | Pausing):
        turn.enter(replace(doing, done=doing.done.with_item(role)))
        if role == 0:  # the others have been told no reason
            turn.state = turn.state._replace(early=event.early, unsaved=event.unsaved)
        check_done(turn)
        check_paused(turn)


def note_paused(turn: Turn, event: Paused) -> None:
    """A role stands still after an iteration.

    When nobody waits for that, an earlier coordinator has ordered it. Only a close gets the member
    moving again, and nothing is recomputed when all stand still at the same iteration.
    """
    role, doing, iteration = turn.player(event), turn.state.doing, event.iteration
    if role is None:
        return
    if isinstance(doing, Pausing):
        order = doing.order
        if iteration != order.iteration:
            turn.refuse(f"pause of role {role}", f"nobody waits for a pause at {iteration}")
            return
        turn.enter(replace(doing, order=replace(order, paused=order.paused.with_item(role))))
        check_paused(turn)
        return
    known = doing.pause if isinstance(doing, Rejoining | Opening) else None
    still = PersistentSet[int]() if known is None else known.paused
    if known is not None and known.iteration != iteration:
        still, iteration = PersistentSet(), max(known.iteration, iteration)
    cause = "a pause that was ordered before the coordinator changed"
    order = PauseOrder(iteration, cause, paused=still.with_item(role))
    if isinstance(doing, Rejoining | Opening):
        turn.enter(replace(doing, pause=order))
    else:
        pause(turn, order)


def pause_later(turn: Turn, event: PauseRefused) -> None:
    """Somebody is past the wanted iteration: choose a later one. The deadline stays."""
    state, pausing, iteration = turn.state, turn.state.doing, event.iteration
    if turn.player(event) is None:
        return
    if isinstance(pausing, Pausing) and iteration >= pausing.order.iteration and state.record:
        later = _boundary_after(state, max(state.reached, iteration))
        order = replace(pausing.order, iteration=later, paused=PersistentSet())
        turn.enter(replace(pausing, order=order))
        turn.act(Pause(state.record.epoch, later))


def check_paused(turn: Turn, *, overdue: bool = False) -> None:
    """Once all stand still (or had their time), go through a close as after a failure."""
    pausing, wanted = turn.state.doing, turn.config.world_size
    if not isinstance(pausing, Pausing):
        return
    order, paused, done = pausing.order, pausing.order.paused, pausing.done
    # Cheap for all but the last: a role that is done may have paused, too.
    complete = len(paused) + len(done) >= wanted and len(paused | done) == wanted
    if overdue or complete:
        turn.state = turn.state._replace(fleet=replace(turn.state.fleet, leaving=order.leaving))
        close(turn, Failure(order.cause, FailureKind.DRAINED))
