"""When members stand still at one iteration: before a drain, other protection, missing copies, the
dump at the end. All that was computed is committed then, and the close that follows loses nothing.

Pure functions on a Turn; each sets the phase together with its deadline.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.actions import Pause
from deadpool_megatron.cluster.machine.epoch.closing import close
from deadpool_megatron.cluster.machine.epoch.deciding import owed_copies, record_nodes, seating
from deadpool_megatron.cluster.machine.protection import pause_cause, plan_is_due
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.cluster.machine.state.phases import PauseOrder, Phase
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.layout.cadence import next_due

# Of the time that is left to a run: the rest is for the dump that follows.
_SHARE_OF_PAUSE = 0.2


def consider_pause(turn: Turn) -> None:
    """Pause the running job when a wanted drain, or missing copies, can now be served."""
    state, record = turn.state, turn.state.record
    if state.phase is not Phase.RUNNING or record is None or state.suspicion is not None:
        return
    for node in sorted(state.drains):
        if not seating(turn, frozenset({node})).unseated:
            _pause(turn, f"drain of node {node}", frozenset({node}))
            return
    if plan_is_due(state):
        _pause(turn, pause_cause(state), frozenset())
        return
    if not record.fewer_copies:
        return
    if record.fewer_copies - owed_copies(record.seats, record_nodes(state, record.seats), turn):
        _pause(turn, "a new node can hold the missing copies", frozenset())


def pause_for_dump(turn: Turn, reason: str, seconds: float | None) -> bool:
    """Have all that is computed committed before the epoch is closed for a dump; False where
    nobody trains. ``seconds``: see DumpRequested; a part of them is spent on it.
    """
    state = turn.state
    if state.phase is Phase.RUNNING and state.suspicion is None:
        _pause(turn, reason, frozenset())
    shorten_pause(turn, seconds)
    return turn.state.phase is not state.phase or state.phase is Phase.PAUSING


def shorten_pause(turn: Turn, seconds: float | None) -> None:
    """Only so much is left for the pause under way, if there is one, and for the dump after it."""
    if turn.state.phase is Phase.PAUSING and seconds is not None:
        assert turn.state.deadline is not None
        limit = turn.now + _SHARE_OF_PAUSE * seconds
        turn.set(deadline=min(turn.state.deadline, limit))


def _pause(turn: Turn, cause: str, leaving: frozenset[int]) -> None:
    turn.set(pause=PauseOrder(_boundary_after(turn.state, turn.state.newest), cause, leaving))
    enter_pause(turn)


def _boundary_after(state: State, iteration: int) -> int:
    """One that no role has reached yet, and whose generation is protected: nothing is lost."""
    every = 1 if state.record is None else state.record.protection.every
    return next_due(iteration + 2, every)


def enter_pause(turn: Turn) -> None:
    """Have all members stand still when a pause is wanted and the epoch runs."""
    state = turn.state
    if state.phase is Phase.RUNNING and state.pause is not None and state.record is not None:
        limit = turn.config.settings.hang_seconds * state.record.protection.every
        turn.set(phase=Phase.PAUSING, deadline=turn.now + limit)
        turn.act(Pause(state.record.epoch, state.pause.iteration))
        check_paused(turn)


def pause_later(turn: Turn, iteration: int) -> None:
    """Somebody is past the wanted iteration: choose a later one. The deadline stays."""
    state = turn.state
    assert state.pause is not None
    assert state.record is not None
    later = _boundary_after(state, max(state.newest, iteration))
    turn.set(pause=replace(state.pause, iteration=later, paused=PersistentSet()))
    turn.act(Pause(state.record.epoch, later))


def check_paused(turn: Turn, *, overdue: bool = False) -> None:
    """When all stand still (or had their time), go through a close as after a failure."""
    state = turn.state
    if state.phase is not Phase.PAUSING or state.pause is None:
        return
    paused, done, wanted = state.pause.paused, state.done, turn.config.world_size
    # Cheap for all but the last: a role that is done may have paused, too.
    complete = len(paused) + len(done) >= wanted and len(paused | done) == wanted
    if overdue or complete:
        turn.set(leaving=state.pause.leaving)
        close(turn, Failure(state.pause.cause, FailureKind.DRAINED))
