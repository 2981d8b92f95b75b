"""The order to save the state and to end (``deadpool stop --dump``), kept for later coordinators.

It takes until a last export is written and members stand still; a coordinator that is lost in that
time takes the order with it, and what gave it (a batch script, a user) may be gone by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator_options import CoordinatorOptions
from deadpool_megatron.cluster.journal import JournalError
from deadpool_megatron.cluster.journals import write_patiently
from deadpool_megatron.cluster.machine_state import Phase, State

_KIND = "end"
# Orders are repeated (``--wait``), each time with what is left of the same time.
_SAME_SECONDS = 5.0
# Saving the state needs no journal, and may be the last chance: it is not waited for longer.
_NOTE_SECONDS = 1.0


@dataclass(frozen=True)
class _Note:
    """``ends``: wall clock (seconds since 1970), for another host reads it; None: no haste."""

    reason: str
    ends: float | None

    def left(self) -> float | None:
        """Seconds."""
        return None if self.ends is None else max(0.0, self.ends - time.time())


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
        self._patience = options.info.settings.spare_timeout_seconds
        self._state = state
        self._end_run = end_run
        self._said: _Note | None = None
        self._due: _Note | None = None
        self._writing: set[asyncio.Task[None]] = set()
        found = self._journal.newest(_KIND)
        self._number = 0 if found is None else found[0]
        if found is None or found[1]["reason"] == "":
            return
        if options.restarted:  # what was ordered before all its processes ended is over
            self._number += 1
            self._journal.write(_KIND, self._number, asdict(_Note("", None)))
        else:
            ends = found[1]["ends"]
            self._due = _Note(str(found[1]["reason"]), None if ends is None else float(ends))

    async def take(self, reason: str, seconds: float | None) -> None:
        """``seconds``: how long the run may take to end, None to have no limit."""
        note = _Note(reason, None if seconds is None else time.time() + seconds)
        if self._said is None or _is_earlier(note, self._said):
            self._said = note
            self._number += 1
            writing = asyncio.create_task(self._write(self._number, note))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
            await asyncio.wait({writing}, timeout=_NOTE_SECONDS)
        state = self._state()
        if state.phase is not Phase.GATHERING or state.record is None:
            self._end_run(reason, note.left())
        elif self._due is None or _is_earlier(note, self._due):
            self._due = note

    def carry_out(self) -> None:
        """What came before it was known what goes on, to an earlier coordinator or to this one."""
        if self._due is not None:
            note, self._due = self._due, None
            self._said = self._said or note
            self._end_run(note.reason, note.left())

    async def _write(self, number: int, note: _Note) -> None:
        try:
            name = (_KIND, number)
            await write_patiently(self._journal, name, asdict(note), self._patience, _ignore)
        except JournalError:
            return  # it is carried out all the same; LostRace: another one has noted an order
        failpoints.hit("coordinator.end-order")


def _ignore(_: str) -> None:
    """Whoever writes epochs to this journal tells of its troubles."""


def _is_earlier(note: _Note, than: _Note) -> bool:
    if note.ends is None:
        return False
    return than.ends is None or note.ends < than.ends - _SAME_SECONDS
