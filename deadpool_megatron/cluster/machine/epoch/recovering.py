"""The clock of a recovery: what members report to it, and the first iteration, which ends it."""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.state.phases import OPEN_PHASES
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind

# So many recoveries are told one by one when the run ends; the events have all of them.
RECOVERIES_SHOWN = 100


def end_recovery(turn: Turn) -> None:
    """The first iteration after the recovery is complete: report where the time went."""
    state = turn.state
    if state.recovery is None or state.record is None or state.phase not in OPEN_PHASES:
        return
    report = state.recovery.finish(state.record, turn.now)
    turn.set(
        recovery=None,
        recoveries=(*state.recoveries, report)[-RECOVERIES_SHOWN:],
        recovery_count=state.recovery_count + 1,
        steps_recomputed=state.steps_recomputed + report.steps_recomputed,
    )
    turn.emit(Kind.RECOVERED, **{k: v for k, v in report.to_dict().items() if k != "epoch"})


def reported(turn: Turn, event: ev.PhaseReported | ev.Exposed) -> None:
    state = turn.state
    if state.recovery is not None:
        if state.record is None or event.epoch != state.record.epoch:
            return
        if isinstance(event, ev.PhaseReported):
            turn.set(recovery=state.recovery.report(event.phase, event.seconds))
        else:
            longest = max(state.recovery.exposed, event.seconds)
            reported = state.recovery.report("reprotect", event.seconds)
            turn.set(recovery=replace(reported, exposed=longest))
    elif state.recoveries and state.recoveries[-1].epoch == event.epoch:
        *earlier, last = state.recoveries
        if isinstance(event, ev.PhaseReported):
            last = last.with_phase(event.phase, event.seconds)
        else:
            last = last.with_phase("reprotect", event.seconds)
            last = replace(last, exposed_seconds=max(last.exposed_seconds, event.seconds))
        turn.set(recoveries=(*earlier, last))
