"""The clock of a recovery: what members report to it, and the first iteration, which ends it."""

from __future__ import annotations

from deadpool_megatron.cluster.machine.state.phases import Open
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind


def end_recovery(turn: Turn) -> None:
    """The first iteration after the recovery is complete: report where the time went."""
    state, recovery = turn.state, turn.state.recoveries.current
    if recovery is None or state.record is None or not isinstance(state.doing, Open):
        return
    report = recovery.finish(state.record, turn.now)
    turn.state = state._replace(recoveries=state.recoveries.with_finished(report))
    turn.emit(Kind.RECOVERED, **{k: v for k, v in report.to_dict().items() if k != "epoch"})


def note_phase(turn: Turn, epoch: int, phase: str, seconds: float, *, exposed: float = 0.0) -> None:
    """A member or vault tells how long its part of the recovery took."""
    state = turn.state
    known = state.recoveries.reported(state.record, epoch, phase, seconds, exposed)
    if known is not state.recoveries:
        turn.state = state._replace(recoveries=known)
