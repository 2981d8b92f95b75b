"""Blocking calls that can be abandoned, and threads that connect groups to their peers.

Threads of this module make the calls, while each caller waits on a lock. A thread has a queue and a
lock instead of an executor and futures, because every point-to-point wait passes through here
(about 50 us of CPU against 155 us, measured on two busy cores).

An abandoned call may still proceed, unless it is in a thread of gloo that sleeps. A thread that
could run is in state R even while it waits for a processor, so a busy machine does not make it look
asleep. Linux only.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deadpool_megatron.comms.in_flight.epoch import Epoch

#: more threads would gain nothing, since most of the time is spent waiting for peers
MAX_BUILDERS = 8
#: names that torch and gloo give to threads for collectives, and for a device's connections
_WORKERS = frozenset({"pt_gloo_runloop"})
_LOOPS = frozenset({"gloo_tcp_loop"})
_SAMPLES = 4
_BETWEEN_SECONDS = 0.025
_STATUS = re.compile(r"^State:\s+(\S).*?^voluntary_ctxt_switches:\s+(\d+)", re.M | re.S)


class Abandoned(Exception):
    """The caller has abandoned a call that continues in its thread, after its deadline
    (``deadline``) or the close of the epoch."""

    def __init__(self, waiter: Waiter, deadline: bool) -> None:
        super().__init__("a blocking call was abandoned")
        self.waiter = waiter
        self.deadline = deadline


class Waiter:
    """A thread that makes blocking calls for others, one at a time."""

    __slots__ = ("error", "finished", "inbox", "is_abandoned", "native_id", "wake")

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        # A binary semaphore, held until something happens. Spurious releases are harmless because
        # the caller checks `finished` and the epoch after each wake.
        self.wake = threading.Lock()
        self.wake.acquire()
        self.finished = False
        self.is_abandoned = False
        self.error: BaseException | None = None
        thread = threading.Thread(target=self._serve, name="deadpool-waiter", daemon=True)
        thread.start()
        self.native_id = thread.native_id or 0

    def begin(self, call: Callable[[], Any]) -> None:
        """Start ``call`` in the thread, without traces of an earlier call."""
        self.finished = False
        self.error = None  # an earlier call may have ended while it was abandoned
        self.inbox.put(call)

    def _serve(self) -> None:
        while True:
            call = self.inbox.get()
            if call is None:
                return
            try:
                call()
            except BaseException as error:
                self.error = error
            del call
            if self.is_abandoned:
                self.error = None  # no caller will read the error, whose traceback holds this frame
            self.finished = True
            self.notify()

    def notify(self) -> None:
        """Make the caller check again; any thread."""
        with contextlib.suppress(RuntimeError):  # already released and not yet noticed
            self.wake.release()


class WaiterPool:
    """Threads that are made on demand (never before the first call, so a fork before it is safe).

    There are as many threads as callers that wait at the same time, plus those of abandoned calls,
    which end when their call returns. Thread-safe.
    """

    def __init__(self) -> None:
        self._idle: list[Waiter] = []
        self._busy: set[Waiter] = set()

    def call(
        self, function: Callable[[], Any], epoch: Epoch, deadline_seconds: float | None = None
    ) -> None:
        """Run ``function`` in a thread and wait for it; raises its exception.

        Raises Abandoned when the epoch is closed and the grace is over, or after the deadline.
        """
        try:
            waiter = self._idle.pop()
        except IndexError:
            waiter = Waiter()
        self._busy.add(waiter)
        waiter.begin(function)
        deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        try:
            while not waiter.finished:
                closed = epoch.closed
                until = epoch.grace_over if closed else deadline
                seconds = None if until is None else until - time.monotonic()
                if seconds is not None and seconds <= 0:
                    raise Abandoned(waiter, deadline=not closed)
                waiter.wake.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            self._busy.discard(waiter)
            if waiter.finished:
                self._idle.append(waiter)
            else:
                waiter.is_abandoned = True
                waiter.inbox.put(None)
        error, waiter.error = waiter.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a cycle would keep tensors alive

    def wake_all(self) -> None:
        """Make every caller check its epoch now."""
        for waiter in list(self._busy):
            waiter.notify()

    def shut_down(self) -> None:
        """End the idle threads."""
        while self._idle:
            self._idle.pop().inbox.put(None)


def stays_asleep(others: Set[int]) -> bool:
    """Return whether no gloo worker, nor any of the thread ids ``others``, ran for 0.1 s.

    The threads are observed after the loop of each device was idle once: the bytes that the loop
    had received are then delivered, and the threads that it woke are no longer asleep.
    """
    for _ in range(_SAMPLES):
        if _switches(_LOOPS, frozenset()) is not None:
            break
        time.sleep(_BETWEEN_SECONDS / 5)
    else:
        return False
    first = _switches(_WORKERS, others)
    for _ in range(_SAMPLES):
        if first is None:
            return False
        time.sleep(_BETWEEN_SECONDS)
        if _switches(_WORKERS, others) != first:
            return False
    return True


def _switches(names: Set[str], others: Set[int]) -> dict[int, int] | None:
    """Return thread id -> number of times the thread went to sleep, for gloo's threads with these
    ``names`` and the thread ids ``others``; None if any of them does not sleep."""
    switches: dict[int, int] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            number = int(task.name)
            # The kernel cuts names at 15 bytes, perhaps in the middle of a letter.
            name = (task / "comm").read_text(errors="replace").strip()
            if name not in names and number not in others:
                continue
            found = _STATUS.search((task / "status").read_text(errors="replace"))
        except OSError:
            continue  # the thread has ended
        if found is None or found[1] != "S":
            return None
        switches[number] = int(found[2])
    return switches


@dataclass(frozen=True)
class BuildJob:
    """The job to connect a group; ``connect`` returns when all its peers have taken part."""

    place: str
    connect: Callable[[], None]


class Builders:
    """Threads that connect groups in the order given, up to ``at_once`` at the same time.

    No circle of waits can exist when every process takes its groups out of the same global order,
    however many it connects at once. Consider the first group in that order that is not connected:
    each of its members has connected all its earlier groups, so this group is its first unfinished
    group, and because groups are started in order, it has started it. All members take part, so the
    group gets connected, and another group is the first.
    """

    def __init__(self, jobs: Sequence[BuildJob], at_once: int) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(jobs)
        self._started: list[BuildJob] = []
        self._stopped = False
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name="deadpool-builder", daemon=True)
            for _ in range(min(at_once, len(jobs)))
        ]

    def add(self, jobs: Iterable[BuildJob]) -> None:
        """Connect these groups as well, after all others. Called before the run, or by a job."""
        self._waiting.extend(jobs)

    def run(self) -> None:
        """Connect all groups. Raises the first error, while other groups are still connecting."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            error = self._ends.get()
            if error is not None:
                raise error

    def stop(self) -> None:
        """Start no further group. Any thread."""
        self._stopped = True

    @property
    def oldest(self) -> str:
        """The place of the first group that is not connected, or nothing. Any thread."""
        with self._lock:
            return self._started[0].place if self._started else ""

    @property
    def finished(self) -> bool:
        """Return whether no thread hangs in a group any more. Any thread."""
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        try:
            while (job := self._begin()) is not None:
                job.connect()
                with self._lock:
                    self._started.remove(job)
        except BaseException as error:
            self.stop()
            self._ends.put(error)
        else:
            self._ends.put(None)

    def _begin(self) -> BuildJob | None:
        with self._lock:
            if self._stopped or not self._waiting:
                return None
            self._started.append(self._waiting.popleft())
            return self._started[-1]


class Connecting:
    """The place where the main thread waits during an attach; see epoch.Waiting."""

    operation = "attach"
    sequence = 0

    def __init__(self, builders: Builders) -> None:
        self._builders = builders

    @property
    def place(self) -> str:
        """The first group that is not connected; after all of them a barrier over WORLD."""
        return self._builders.oldest or "WORLD (barrier)"
