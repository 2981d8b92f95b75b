"""The time of a device: its progress in each group, and the time in which its streams wait.

Where a wait only orders streams (NCCL), the host does not wait and its clock shows nothing. So a
stream is marked before and after each wait; when the device has passed the marks, the time between
them is the time in which it was idle. An iteration may have tens of thousands of waits, so only
some iterations are measured (:mod:`deadpool_megatron.member.own_time`).

torch's flight recorder has the progress. Its watchdog polls the events of all operations ten times
a second, and keeps for each group the numbers of the last operation that was enqueued, started, and
completed. By FlightRecorderDetail.hpp and ProcessGroupNCCL.hpp of torch 2.13, ``pg_status`` has
these numbers under the number that the process has given to the group's object (``uid``). No two
objects share that number, over all epochs, while each epoch repeats the names in ``pg_config``. The
number of the started operation is known only with ``TORCH_NCCL_ENABLE_TIMING``, which is never set:
it costs events, and torch warns of watchdogs that hang. After an error or a timeout the watchdog
drops pending operations and calls all of them completed. So of a group whose backend has an error,
only the number of the enqueued operation is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch

# More than any known iteration needs; an iteration with more is not measured.
MAX_WAITS = 1 << 16

# Enqueued, started (None: not known), completed.
Numbers = tuple[int, int | None, int]
_NUMBERS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")

_Answer = TypeVar("_Answer")


class StreamWaits:
    """The waits of an iteration. Any thread waits; the main thread begins, ends and reads.

    The fabric of a device sets ``clock``; without a clock no iteration is measured.
    """

    def __init__(self) -> None:
        self.clock: CudaClock | None = None
        self._is_open = False
        self._waits: list[tuple[Any, Any]] = []
        self._whole: tuple[Any, Any] | None = None
        self._began: Any = None

    @property
    def count(self) -> int:
        """The number of waits of the iteration measured last."""
        return len(self._waits)

    def begin(self) -> bool:
        """Start measuring; False without a clock, or before the last iteration was read."""
        if self.clock is None or self._whole is not None:
            return False
        self._forget()
        self._began = self.clock.mark()
        self._is_open = True
        return True

    def end(self) -> None:
        """Stop measuring."""
        if self._is_open and self.clock is not None:
            self._is_open = False
            self._whole = self._began, self.clock.mark()

    def drop(self) -> None:
        """Drop the measurement of an epoch that is over."""
        self._is_open, self._whole = False, None
        self._forget()

    def around(self, wait: Callable[[], _Answer]) -> _Answer:
        """Call ``wait``, a wait or an operation that runs on the current stream, and measure it."""
        clock = self.clock
        if not self._is_open or clock is None or len(self._waits) >= MAX_WAITS:
            return wait()
        if clock.is_recorded():
            return wait()
        before = clock.mark()
        answer = wait()
        self._waits.append((before, clock.mark()))
        return answer

    def read(self) -> tuple[float, float] | None:
        """Return the seconds of the iteration, and the seconds of its waits; None while the device
        has not finished the iteration, or if none was measured."""
        clock, whole = self.clock, self._whole
        if clock is None or whole is None or not clock.is_passed(whole[1]):
            return None
        if len(self._waits) >= MAX_WAITS:
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
    """Return uid -> numbers enqueued, started (None: not known), completed, for the groups that
    have had an operation. Raises ValueError for another form.
    """
    found: Any = json.loads(dump)
    try:
        status: Mapping[str, Mapping[str, str]] = found["pg_status"]
        return {uid: _numbers(status[str(uid)]) for uid in uids if str(uid) in status}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no dump of the flight recorder: {error!r}") from error


def _numbers(status: Mapping[str, str]) -> Numbers:
    # -1 before the first operation.
    enqueued, started, completed = (int(status[name]) for name in _NUMBERS)
    return max(0, enqueued), None if started < 0 else started, max(0, completed)


class CudaClock:
    """The clock of a GPU: marks are timed events in the stream of the calling thread, which are
    reused. Any thread. Has never run on a GPU.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Return a mark at the end of the stream; costs microseconds and never blocks."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_recorded(self) -> bool:
        """Return whether the stream is capturing a graph: a mark in it would be repeated in every
        replay, and could not be queried."""
        return bool(torch.cuda.is_current_stream_capturing())

    def is_passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has passed the mark. Never blocks."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Return the seconds between two passed marks."""
        return float(earlier.elapsed_time(later)) / 1000

    def forget(self, mark: torch.cuda.Event) -> None:
        """Allow the mark to be reused."""
        self._free.append(mark)
