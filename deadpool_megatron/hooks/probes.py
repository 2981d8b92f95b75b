"""Probes of a role, of which the coordinator hears: the time that it works for an iteration
without waiting for others, and, once it makes no progress, what its groups wait for."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from deadpool_megatron.comms import Communicators, StreamWaits

# What a mark in a stream costs the host, generously, and the part of training that marks may take.
_MARK_SECONDS = 5e-6
_MOST_SHARE = 1e-3
# So long without progress, and so often from then on: the recorder is not asked while all is well.
_STILL_SECONDS = 1.0


class OwnTimeMeter(ABC):
    """Main thread; :attr:`sample` may be read by any."""

    def __init__(self) -> None:
        # (measured iterations, seconds of all of them), since the epoch began.
        self.sample = (0, 0.0)

    def reset(self) -> None:
        """A new epoch begins."""
        self.sample = (0, 0.0)

    @abstractmethod
    def begin(self) -> None:
        """An iteration begins."""

    @abstractmethod
    def end(self) -> None:
        """It is finished."""

    def _add(self, seconds: float) -> None:
        iterations, before = self.sample
        self.sample = (iterations + 1, before + max(0.0, seconds))


class HostMeter(OwnTimeMeter):
    """A meter where waits hold the host (gloo). ``waited()`` answers the seconds which the main
    thread has waited so far, in communication or for protection."""

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
    """A meter where waits hold a stream (NCCL): by marks in it, in as many iterations as cost next
    to nothing. ``stalled()`` answers the seconds which the host has waited for protection so
    far."""

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
            self._to_skip = ceil(cost / (_MOST_SHARE * max(whole, 1e-6))) - 1
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


class Standstill:
    """Says of its groups, in the beats of a member that makes no progress, what helps to find the
    culprit. Used by the watcher thread alone, which makes the beats."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._progress = -1
        self._since = 0.0
        self._told: dict[str, Any] = {}

    def look(self, communicators: Communicators) -> Mapping[str, Any]:
        """Return what a beat says besides, once the process has stood still for a while:
        ``begun``, a group and the numbers of its collectives and messages that the host has begun,
        for each group in which the host itself waits; and ``device``, where operations run on one:
        a group, the numbers of its operations that were enqueued, started and completed, and
        whether they are collectives.
        """
        progress, now = communicators.progress(), self._now()
        if progress != self._progress:
            self._progress, self._since, self._told = progress, now, {}
        elif now - self._since >= _STILL_SECONDS:
            self._since = now
            begun = [
                [group, one.collectives, one.messages]
                for group, one in sorted(communicators.begun().items())
            ]
            self._told = {**self._told, "begun": begun}
            found = None
            # What the recorder of another version says is no evidence; the beat goes on.
            with contextlib.suppress(ValueError, AttributeError, RuntimeError):
                communicators.look()
                found = communicators.positions()
            if found is not None:
                self._told["device"] = [
                    [group, one.enqueued, one.started, one.completed, one.collective]
                    for group, one in sorted(found.items())
                ]
        return self._told
