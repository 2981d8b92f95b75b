"""What of the machine's state goes into the next record for a successor, and comes back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from immutables import Map

from deadpool_megatron.cluster.machine.state.causes import Failure
from deadpool_megatron.cluster.machine.state.recoveries import Recoveries
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.layout.decision import keep_line
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.records import Restore


def of_next_epoch(state: State, restore: Restore) -> History:
    """What the record of the next epoch, restored from ``restore``, says of the run so far."""
    recovery = state.recoveries.current
    again = 0 if recovery is None else recovery.recomputed(restore)
    return History(
        kept=keep_line(state.line.kept, restore, state.epoch + 1),
        gone=dict(sorted(state.fleet.gone.items())),
        nonfinite=state.blame.nonfinite,
        failures=tuple(failure.to_record(k) for k, failure in state.blame.failures),
        recoveries=state.recoveries.count + (recovery is not None),
        steps_recomputed=state.recoveries.steps_recomputed + again,
        protection_told=state.protection.told,
    )


def with_history(state: State, history: History, gone: Mapping[int, str]) -> State:
    """Returns the state with what the newest record gives back; ``gone``: nodes given up since."""
    failures = tuple((int(one["iteration"]), Failure.from_record(one)) for one in history.failures)
    return state._replace(
        fleet=replace(state.fleet, gone=Map({**history.gone, **gone})),
        line=replace(state.line, kept=history.kept),
        # So that what repeats ends the run, whoever coordinates when it does.
        blame=replace(state.blame, nonfinite=history.nonfinite, failures=failures),
        # A plan that came with the record is reported (again): nobody knows if it was.
        protection=replace(state.protection, told=history.protection_told),
        recoveries=Recoveries(count=history.recoveries, steps_recomputed=history.steps_recomputed),
    )
