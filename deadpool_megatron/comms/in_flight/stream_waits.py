"""The time for which streams of a device stand still for communication, in iterations that are
measured.

Where a wait only orders streams (NCCL), the host does not wait and its clock says nothing. So a
stream is marked before and after each wait; when the device has passed the marks, the time between
them is the time in which it had nothing to do. An iteration may have tens of thousands of waits:
who measures chooses how seldom (:mod:`deadpool_megatron.hooks.probes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

# More than any iteration that we know of needs; one that has more is not measured.
MOST_WAITS = 1 << 16

_Mark = TypeVar("_Mark")
_Answer = TypeVar("_Answer")


class DeviceClock(ABC, Generic[_Mark]):
    """The time of a device: marks are places in the stream of the calling thread. Any thread."""

    @abstractmethod
    def mark(self) -> _Mark:
        """Return where the stream is now; costs microseconds and never blocks."""

    @abstractmethod
    def is_passed(self, mark: _Mark) -> bool:
        """Return whether the device has come to it. Never blocks."""

    @abstractmethod
    def seconds(self, earlier: _Mark, later: _Mark) -> float:
        """Between two marks that are passed."""

    @abstractmethod
    def forget(self, mark: _Mark) -> None:
        """It is not used any more; its memory may be that of another one."""


class StreamWaits:
    """The waits of one iteration. Any thread waits; the main thread begins, ends and reads.

    ``clock`` is set by the fabric of a device; without one nothing is ever measured.
    """

    def __init__(self) -> None:
        self.clock: DeviceClock[Any] | None = None
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
