"""Threads that connect groups to their peers, several groups at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

#: most of the time is waiting for peers; more threads than this bring nothing
AT_ONCE = 8


@dataclass(frozen=True)
class Job:
    """One group; ``connect`` returns when all its peers have come."""

    place: str
    connect: Callable[[], None]


class Builders:
    """Connects groups in the order given, up to ``at_once`` of them at the same time.

    No circle of waits can exist when every process takes its groups out of one global order,
    however many it connects at once. Of the groups that are not up yet, look at the first one in
    that order: each of its members has all its earlier groups up, so this group is the first one
    that it has not finished, and because groups are begun in order, it has begun it. All members
    are there, so the group comes up, and another one is the first.
    """

    def __init__(self, jobs: Sequence[Job], at_once: int) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(jobs)
        self._begun: dict[int, Job] = {}
        self._number = 0
        self._stopped = False
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name="deadpool-builder", daemon=True)
            for _ in range(min(at_once, len(jobs)))
        ]

    def add(self, jobs: Iterable[Job]) -> None:
        """Connect these as well, behind all others; before the run, or by one of its jobs."""
        self._waiting.extend(jobs)

    def run(self) -> None:
        """Connect all of them. Raises the first error; groups that were begun then continue."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            error = self._ends.get()
            if error is not None:
                raise error

    def stop(self) -> None:
        """Begin no further group. Any thread."""
        self._stopped = True

    @property
    def oldest(self) -> str:
        """The place of the first group that is not up, or nothing. Any thread."""
        with self._lock:
            first = next(iter(self._begun.values()), None)
        return "" if first is None else first.place

    @property
    def finished(self) -> bool:
        """Return whether no thread hangs in a group any more. Any thread."""
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        try:
            while (begun := self._begin()) is not None:
                number, job = begun
                job.connect()
                with self._lock:
                    del self._begun[number]
        except BaseException as error:
            self.stop()
            self._ends.put(error)
        else:
            self._ends.put(None)

    def _begin(self) -> tuple[int, Job] | None:
        with self._lock:
            if self._stopped or not self._waiting:
                return None
            self._number += 1
            job = self._begun[self._number] = self._waiting.popleft()
            return self._number, job


class Finishing(Protocol):
    """Something with a thread that may hang."""

    @property
    def finished(self) -> bool: ...


@dataclass(frozen=True)
class LeftBehind:
    """The threads of one rebuild that was left. The first error ends the one that waits for the
    builders, and other builders may hang for ever."""

    threads: tuple[Finishing, ...]

    @property
    def finished(self) -> bool:
        """Return whether none of them hangs in a group any more. Any thread."""
        return all(one.finished for one in self.threads)


class Connecting:
    """The place where the main thread waits during an attach; see in_flight.epoch.Waiting."""

    operation = "attach"
    sequence = 0

    def __init__(self, builders: Builders) -> None:
        self._builders = builders

    @property
    def place(self) -> str:
        """The first group that is not up; after all of them comes a barrier over WORLD."""
        return self._builders.oldest or "WORLD (barrier)"
