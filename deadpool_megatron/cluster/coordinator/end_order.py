"""The order to save the state and to end (``deadpool stop --dump``), kept for later coordinators.

It takes until a last export is written and members stand still; a coordinator that is lost in that
time takes the order with it, and what gave it (a batch script, a user) may be gone by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.options import CoordinatorOptions
from deadpool_megatron.cluster.journal.choice import write_patiently
from deadpool_megatron.cluster.journal.entries import JournalError, LostRace
from deadpool_megatron.cluster.machine.state import Phase, State

_KIND = "end"
# Orders are repeated (``--wait``), each time with what is left of the same time.
_SAME_SECONDS = 5.0
# Saving the state needs no journal, and may be the last chance: it is not waited for longer.
_NOTE_SECONDS = 1.0


@dataclass(frozen=True)
class _Note:
    """All that was ordered: the earliest end (``ends``: wall clock, seconds since 1970, for another
    host reads it; None: there is none), and whether the dump is wanted next (``at_once``)."""

    reason: str
    ends: float | None
    at_once: bool

    @classmethod
    def of(cls, reason: str, seconds: float | None) -> _Note:
        ends = None if seconds is None else time.time() + seconds
        return cls(reason, ends, seconds is None)

    def and_then(self, later: _Note) -> _Note:
        """Both; this one where the other asks for nothing more."""
        ends = self.ends
        if later.ends is not None and (ends is None or later.ends < ends - _SAME_SECONDS):
            ends = later.ends
        return _Note(self.reason, ends, self.at_once or later.at_once)

    def orders(self) -> list[float | None]:
        """As they were given: seconds until the end, None for the dump next."""
        timed = [] if self.ends is None else [max(0.0, self.ends - time.time())]
        return [*timed, *([None] if self.at_once else [])]


class EndOrder:
    """``end_run(reason, seconds)`` carries an order out. Used from the coordinator's loop only.

    The constructor raises JournalError.
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
        # What was ordered so far, and of that what is still to be carried out.
        self._said: _Note | None = None
        self._due: _Note | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        found = self._journal.newest(_KIND)
        self._number = 0 if found is None else found[0]
        if found is None or found[1]["reason"] == "":
            return
        if options.restarted:  # what was ordered before all its processes ended is over
            self._number += 1
            self._journal.write(_KIND, self._number, asdict(_Note("", None, False)))
        else:
            self._said = self._due = _from_entry(found[1])

    async def take(self, reason: str, seconds: float | None) -> None:
        """``seconds``: how long the run may take to end; None: it has no limit, and the dump is to
        be next."""
        began, note = time.monotonic(), _Note.of(reason, seconds)
        known = self._said
        self._said = note if known is None else known.and_then(note)
        if self._said != known:
            await asyncio.wait({self._spawn(self._write())}, timeout=_NOTE_SECONDS)
        state = self._state()
        if state.phase is Phase.GATHERING and state.record is not None:
            self._due = note if self._due is None else self._due.and_then(note)
        elif seconds is None:
            self._end_run(reason, None)
        else:
            self._end_run(reason, max(0.0, seconds - (time.monotonic() - began)))

    def carry_out(self) -> None:
        """It is known what goes on now: the orders that came before, to whomever."""
        note, self._due = self._due, None
        if note is not None:
            for seconds in note.orders():
                self._end_run(note.reason, seconds)
        elif self._number == 0 and self._state().record is not None:
            self._spawn(self._look_again())

    async def _look_again(self) -> None:
        """The coordinator before may not have known that it had been superseded, and taken one."""
        read = asyncio.get_running_loop().run_in_executor(None, self._journal.newest, _KIND)
        try:
            found = await read
        except JournalError:
            return  # whoever gave it repeats it, or finds the run going on
        if found is not None and self._said is None:
            self._number, self._said = found[0], _from_entry(found[1])
            self._due = self._said
            self.carry_out()

    async def _write(self) -> None:
        """What is newest then; a number that is taken was taken by a coordinator before."""
        while (note := self._said) is not None:
            self._number += 1
            name = (_KIND, self._number)
            try:
                await write_patiently(self._journal, name, asdict(note), self._patience, _ignore)
            except LostRace:
                continue
            except JournalError:
                self._said = None  # the next order tries again
            else:
                failpoints.hit("coordinator.end-order")
            return

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _from_entry(entry: dict[str, Any]) -> _Note:
    ends = entry["ends"]
    return _Note(str(entry["reason"]), None if ends is None else float(ends), entry["at_once"])


def _ignore(_: str) -> None:
    """Whoever writes epochs to this journal tells of its troubles."""
