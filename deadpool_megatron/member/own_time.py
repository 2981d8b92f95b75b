"""The time that a role works on an iteration without waiting for other roles, for heartbeats."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import ceil

from deadpool_megatron.comms import StreamWaits

# The cost of a mark in a stream to the host, rounded up, and the share of training for all marks.
_MARK_SECONDS = 5e-6
_MAX_SHARE = 1e-3


class OwnTimeMeter(ABC):
    """A meter of the time that a role needs by itself. For the main thread; any thread may read
    ``sample``."""

    def __init__(self) -> None:
        # (measured iterations, their seconds in total) since the epoch began.
        self.sample = (0, 0.0)

    def reset(self) -> None:
        """Begin a new epoch."""
        self.sample = (0, 0.0)

    @abstractmethod
    def begin(self) -> None:
        """Begin an iteration."""

    @abstractmethod
    def end(self) -> None:
        """End the iteration."""

    def _add(self, seconds: float) -> None:
        iterations, before = self.sample
        self.sample = (iterations + 1, before + max(0.0, seconds))


class HostMeter(OwnTimeMeter):
    """A meter for waits that block the host (gloo). ``waited()`` returns the seconds for which the
    main thread has waited so far, in communication or for protection."""

    def __init__(self, waited: Callable[[], float]) -> None:
        super().__init__()
        self._waited = waited
        self._began = 0.0
        self._waited_before = 0.0

    def begin(self) -> None:
        self._waited_before = self._waited()
        self._began = time.monotonic()

    def end(self) -> None:
        waited = self._waited() - self._waited_before
        self._add(time.monotonic() - self._began - waited)


class DeviceMeter(OwnTimeMeter):
    """A meter for waits that block a stream (NCCL), by marks in that stream. It skips iterations so
    that the marks cost at most ``_MAX_SHARE`` of training. ``stalled()`` returns the seconds for
    which the host has waited for protection so far."""

    def __init__(self, waits: StreamWaits, stalled: Callable[[], float]) -> None:
        super().__init__()
        self._waits = waits
        self._stalled = stalled
        self._stalled_before = 0.0
        self._stalled_seconds = 0.0
        self._is_measured = False
        self._to_skip = 0

    def reset(self) -> None:
        super().reset()
        self._waits.drop()
        self._is_measured, self._to_skip = False, 0

    def begin(self) -> None:
        found = self._waits.read()
        if found is not None:
            whole, waited = found
            self._add(whole - waited - self._stalled_seconds)
            cost = 2 * self._waits.count * _MARK_SECONDS
            self._to_skip = ceil(cost / (_MAX_SHARE * max(whole, 1e-6))) - 1
        elif self._to_skip > 0:
            self._to_skip -= 1
        if self._to_skip <= 0:
            self._is_measured = self._waits.begin()
            self._stalled_before = self._stalled()

    def end(self) -> None:
        if self._is_measured:
            self._is_measured = False
            self._waits.end()
            self._stalled_seconds = self._stalled() - self._stalled_before
