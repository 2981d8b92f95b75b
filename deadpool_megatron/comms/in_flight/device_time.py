"""The time of a device: how far it is in each group, and how long its streams stand still for
communication, in iterations that are measured.

Where a wait only orders streams (NCCL), the host does not wait and its clock says nothing. So a
stream is marked before and after each wait; when the device has passed the marks, the time between
them is the time in which it had nothing to do. An iteration may have tens of thousands of waits:
whoever measures chooses how seldom (:mod:`deadpool_megatron.member.reports`).

How far it is torch's flight recorder says. Its watchdog looks at the events of all operations ten
times a second, whether anybody waits for them or not, and keeps for each group the numbers of the
last one that was enqueued, started, and completed. Read in FlightRecorderDetail.hpp and
ProcessGroupNCCL.hpp of torch 2.13: ``pg_status`` has them by the number that the process has given
to the group's object (``uid``), which no two objects share over all epochs. The names in
``pg_config`` say nothing of it: a name comes again in each epoch. What was started is known with
``TORCH_NCCL_ENABLE_TIMING`` only, which nobody sets: it costs events, and torch warns of watchdogs
that hang. After an error or a time-out the watchdog lets go of what is pending and calls all of it
completed. So the numbers of a group whose backend tells of an error say what was enqueued, and no
more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch

# More than any iteration that we know of needs; one that has more is not measured.
MOST_WAITS = 1 << 16

# Enqueued, started (None: not known), completed.
Numbers = tuple[int, int | None, int]
_NUMBERS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")

_Answer = TypeVar("_Answer")


class StreamWaits:
    """The waits of one iteration. Any thread waits; the main thread begins, ends and reads.

    ``clock`` is set by the fabric of a device; without one nothing is ever measured.
    """

    def __init__(self) -> None:
        self.clock: CudaClock | None = None
        self._is_open = False
        self._waits: list[tuple[Any, Any]] = []
        self._whole: tuple[Any, Any] | None = None
        self._began: Any = None

    @property
    def count(self) -> int:
        """Of the waits of the iteration measured last."""
        return len(self._waits)

    def begin(self) -> bool:
        """Measure from here on; False where there is no clock, or the last is not read yet."""
        if self.clock is None or self._whole is not None:
            return False
        self._forget()
        self._began = self.clock.mark()
        self._is_open = True
        return True

    def end(self) -> None:
        """Up to here."""
        if self._is_open and self.clock is not None:
            self._is_open = False
            self._whole = self._began, self.clock.mark()

    def drop(self) -> None:
        """An epoch is over; what was measured of it means nothing."""
        self._is_open, self._whole = False, None
        self._forget()

    def around(self, wait: Callable[[], _Answer]) -> _Answer:
        """Make a wait, or an operation that runs on the current stream."""
        clock = self.clock
        if not self._is_open or clock is None or len(self._waits) >= MOST_WAITS:
            return wait()
        if clock.is_recorded():
            return wait()
        before = clock.mark()
        answer = wait()
        self._waits.append((before, clock.mark()))
        return answer

    def read(self) -> tuple[float, float] | None:
        """Seconds of the whole iteration, and of those the ones in which its stream stood still;
        None while the device is not through with it, or nothing was measured."""
        clock, whole = self.clock, self._whole
        if clock is None or whole is None or not clock.is_passed(whole[1]):
            return None
        if len(self._waits) >= MOST_WAITS:
            self._whole = None
            return None
        if not all(clock.is_passed(b) for _, b in self._waits):
            return None
        found = clock.seconds(*whole), sum(clock.seconds(*wait) for wait in self._waits)
        self._whole = None
        return found

    def _forget(self) -> None:
        clock, marks = self.clock, [mark for wait in self._waits for mark in wait]
        self._waits = []
        if clock is not None:
            for mark in marks:
                clock.forget(mark)


def read_positions(dump: bytes, uids: Collection[int]) -> dict[int, Numbers]:
    """Return uid -> numbers enqueued, started (None: not known), completed, of those groups that
    have been given an operation. Raises ValueError for another form.
    """
    found: Any = json.loads(dump)
    try:
        status: Mapping[str, Mapping[str, str]] = found["pg_status"]
        return {uid: _numbers(status[str(uid)]) for uid in uids if str(uid) in status}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no dump of the flight recorder: {error!r}") from error


def _numbers(status: Mapping[str, str]) -> Numbers:
    # -1 before the first one.
    enqueued, started, completed = (int(status[name]) for name in _NUMBERS)
    return max(0, enqueued), None if started < 0 else started, max(0, completed)


class CudaClock:
    """The clock of a GPU: marks are places in the stream of the calling thread, events with a time
    that are used again and again. Any thread. Has never run on a GPU.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Return where the stream is now; costs microseconds and never blocks."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_recorded(self) -> bool:
        """Return whether the stream does nothing now, but captures a graph: a mark in it would be
        one in every replay, and could not be asked for."""
        return bool(torch.cuda.is_current_stream_capturing())

    def is_passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has come to it. Never blocks."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Between two marks that are passed."""
        return float(earlier.elapsed_time(later)) / 1000

    def forget(self, mark: torch.cuda.Event) -> None:
        """It is not used any more; its memory may be that of another one."""
        self._free.append(mark)
