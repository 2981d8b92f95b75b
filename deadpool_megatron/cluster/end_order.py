"""The order to save the state and to end (``deadpool stop --dump``), kept for later coordinators.

It takes until a last export is written and members stand still; a coordinator that is lost in that
time takes the order with it, and what gave it (a batch script, a user) may be gone by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator_options import CoordinatorOptions
from deadpool_megatron.cluster.journal import JournalError, LostRace
from deadpool_megatron.cluster.machine_state import Phase, State

_KIND = "end"
# Orders are repeated (``--wait``), each time with what is left of the same time.
_SAME_SECONDS = 5.0


@dataclass(frozen=True)
class _Note:
    """``ends``: wall clock (seconds since 1970), for another host reads it; None: no haste."""

    reason: str
    ends: float | None


class EndOrder:
    """``end_run(reason, seconds)`` carries the order out. Used from the coordinator's loop only.

    Raises JournalError.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        state: Callable[[], State],
        end_run: Callable[[str, float | None], None],
    ) -> None:
        self._journal = options.journal
        self._state = state
        self._end_run = end_run
        self._said: _Note | None = None
        self._found: _Note | None = None
        found = self._journal.newest(_KIND)
        if found is None or found[1]["reason"] == "":
            return
        if options.restarted:  # what was ordered before all its processes ended is over
            self._write(_Note("", None))
        else:
            ends = found[1]["ends"]
            self._found = _Note(str(found[1]["reason"]), None if ends is None else float(ends))

    def take(self, reason: str, seconds: float | None) -> None:
        """``seconds``: how long the run may take to end, None to have no limit.

        Raises LostRace when another coordinator decides now.
        """
        note = _Note(reason, None if seconds is None else time.time() + seconds)
        if self._said is None or _is_earlier(note, self._said):
            try:
                self._write(note)
            except LostRace:
                raise
            except JournalError:
                pass  # saving the state does not need the journal, and may be the last chance
            self._said = note
        self._end_run(reason, seconds)

    def tick(self) -> None:
        """Carry out what an earlier coordinator was told, once it is known what goes on."""
        if self._found is None or self._state().phase is Phase.GATHERING:
            return
        note, self._found = self._found, None
        self._said = note
        left = None if note.ends is None else max(0.0, note.ends - time.time())
        self._end_run(note.reason, left)

    def _write(self, note: _Note) -> None:
        newest = self._journal.newest(_KIND)
        self._journal.write(_KIND, 1 if newest is None else newest[0] + 1, asdict(note))
        failpoints.hit("coordinator.end-order")


def _is_earlier(note: _Note, than: _Note) -> bool:
    if note.ends is None:
        return False
    return than.ends is None or note.ends < than.ends - _SAME_SECONDS
