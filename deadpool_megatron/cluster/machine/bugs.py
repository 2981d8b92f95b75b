"""Failures that repeat at one step are the program's own: the run ends, with the evidence.

Pure functions on a Turn. What repeats on one *node* is judged in machine_repeats.
"""

from __future__ import annotations

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.last_words import LastWords
from deadpool_megatron.cluster.machine.state import Failure, Turn

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
