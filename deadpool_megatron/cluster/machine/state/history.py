"""What of the machine's state goes into the next record for a successor, and comes back from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from immutables import Map

from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.layout.decision import keep_line
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.records import EpochRecord, Restore


def of_next_epoch(state: State, restore: Restore) -> History:
    """What the record of the next epoch, restored from ``restore``, says of the run so far."""
    recovery = state.recovery
    again = 0 if recovery is None else recovery.recomputed(restore)
    return History(
        kept=keep_line(state.kept, restore, state.epoch + 1),
        gone=dict(sorted(state.gone.items())),
        nonfinite=state.nonfinite,
        failures=tuple(failure.to_record(k) for k, failure in state.failures),
        recoveries=state.recovery_count + (recovery is not None),
        steps_recomputed=state.steps_recomputed + again,
        protection_told=state.protection_told,
    )


def as_found(record: EpochRecord, gone: Mapping[int, str]) -> dict[str, Any]:
    """The fields of the state that the newest record gives back; ``gone``: nodes given up since."""
    history = record.history
    return {
        "kept": history.kept,
        "gone": Map({**history.gone, **gone}),
        "nonfinite": history.nonfinite,
        # So that what repeats ends the run, whoever coordinates when it does.
        "failures": tuple(
            (int(values["iteration"]), Failure.from_record(values)) for values in history.failures
        ),
        "recovery_count": history.recoveries,
        "steps_recomputed": history.steps_recomputed,
        # A plan that came with the record is reported (again): nobody knows if it was.
        "protection_told": history.protection_told,
    }
