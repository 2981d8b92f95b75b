"""One epoch of communicators: its flag, its operations in flight, how it is closed and freed."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NoReturn, Protocol, runtime_checkable

from deadpool_megatron.comms import inner
from deadpool_megatron.comms.in_flight import waiters
from deadpool_megatron.comms.in_flight.device_time import StreamWaits
from deadpool_megatron.comms.in_flight.waiters import WaiterPool
from deadpool_megatron.settings import flag_name

FaultCallback = Callable[[str, str, str], None]


@dataclass(frozen=True)
class Stuck:
    """An unfinished operation: its inner group, and the thread that was left waiting for it.

    ``receives``: what it writes comes straight from a connection.
    """

    group: object
    waiter: int | None
    receives: bool = False


@runtime_checkable
class Pending(Protocol):
    """An operation that was started and not seen to end."""

    def unfinished_in(self) -> Stuck | None:
        """Return where it can still write into its outputs; None: it is finished, or only reads."""

    def finish(self) -> None:
        """Wait for it, abandonably."""


class Waiting(Protocol):
    """The place where a thread waits."""

    @property
    def place(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def sequence(self) -> int: ...


@dataclass
class Activity:
    """Something a thread waits in that is no operation of a group."""

    place: str
    operation: str
    sequence: int = 0


@dataclass
class Progress:
    """Counts finished operations over all epochs; a lost count under races does no harm.

    ``waited_seconds``: of the main thread, in operations whose wait blocks the host;
    ``stream_waits``: of streams, where a wait blocks these.
    """

    finished: int = 0
    waited_seconds: float = 0.0
    stream_waits: StreamWaits = field(default_factory=StreamWaits)


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds. ``operation_timeout_seconds`` bounds any gloo operation, and with it
    the life of what an interrupted one leaves behind, ``long_operation_seconds`` one that waits for
    what a peer does on purpose (0: none). After a fault, a failed call waits ``close_wait_seconds``
    for the close of the epoch. ``drain_seconds`` is the deadline of a drain, ``grace_seconds`` the
    time that an interrupted wait gets to end by itself."""

    operation_timeout_seconds: float = 60.0
    close_wait_seconds: float = 30.0
    drain_seconds: float = 5.0
    grace_seconds: float = 0.1
    long_operation_seconds: float = 0.0


@dataclass
class Leftovers:
    """Remains of an epoch for the reaper."""

    works: list[Pending]
    groups: list[inner.InnerGroup]
    fabrics: list[inner.Fabric]


class Epoch:
    """State shared by all inner groups made by one attach.

    ``closed`` is set once and never cleared; ``in_flight`` maps a serial number to operations that
    nobody has waited for, ``abandoned`` holds those whose wait was left, ``waits`` maps a thread id
    to what it waits in, ``ends`` holds what to call at the close. Dictionaries are only touched by
    single operations, atomic in CPython, so the hot path takes no lock.
    """

    def __init__(
        self,
        number: int,
        limits: Limits,
        pool: WaiterPool,
        progress: Progress,
        on_fault: FaultCallback | None,
    ) -> None:
        self.number = number
        self.limits = limits
        self.grace_seconds = limits.grace_seconds
        self.pool = pool
        self.progress = progress
        self.main_ident = threading.main_thread().ident
        #: whether an operation may wait for a peer that does something long on purpose
        self.is_patient = False
        #: from the making on: what is used for the first time may hold its thread for seconds
        self.in_first_step = True
        self.closed = False
        self.closed_at_seconds = 0.0
        self.serials = itertools.count()
        self.in_flight: dict[int, Pending] = {}
        self.abandoned: list[Pending] = []
        self.waits: dict[int, Waiting] = {}
        self.ends: dict[int, Callable[[], None]] = {}
        self.fabrics: dict[str, inner.Fabric] = {}  # by transport
        self.groups: list[inner.InnerGroup] = []
        self._closed_event = threading.Event()
        self._on_fault = on_fault
        self._fault_lock = threading.Lock()
        self._fault_reported = False

    def close(self) -> None:
        """Set the flag, abort all fabrics, wake all waits. Any thread, any number of times."""
        if not self.closed:
            self.retire()
        # The waits are woken before and after: the abort of an NCCL fabric may take its time.
        self.pool.wake_all()
        self.abort()
        self.pool.wake_all()
        for end in list(self.ends.values()):
            end()

    def retire(self) -> None:
        """Set the flag without harming peers that may still be reading: a planned change."""
        self.closed_at_seconds = time.monotonic()
        self.closed = True
        self._closed_event.set()

    def abort(self) -> None:
        """Abort all fabrics; again and again while connections may still come up."""
        for fabric in list(self.fabrics.values()):
            fabric.abort()

    def check(self, operation: str) -> None:
        """Raise EpochClosed if the epoch is closed."""
        if self.closed:
            raise inner.EpochClosed(self.number, operation)

    def fault(
        self, description: str, operation: str, text: str, wait_seconds: float | None = None
    ) -> NoReturn:
        """A communication failed: report it once, wait for the close, unwind.

        The wait is ``wait_seconds``, by default the limit of this epoch.

        Raises EpochClosed when the epoch is or gets closed, else CommunicatorFault.
        """
        if "Timed out" in text:
            setting = "first_step_seconds" if self.is_patient else "operation_timeout_seconds"
            text += f" (the limit is {flag_name(setting)})"
        if not self.closed:
            self.report(description, operation, text)
            if wait_seconds is None:
                wait_seconds = self.limits.close_wait_seconds
            self._closed_event.wait(wait_seconds)
        if self.closed:
            raise inner.EpochClosed(self.number, f"{operation} on {description}")
        raise inner.CommunicatorFault(description, operation, text)

    def report(self, description: str, operation: str, text: str) -> None:
        """Tell of a fault, of the first one in the epoch. Any thread."""
        with self._fault_lock:
            first, self._fault_reported = not self._fault_reported, True
        if first and self._on_fault is not None:
            self._on_fault(description, operation, text)

    def finish_in_flight(self) -> None:
        """Wait for every operation that nobody waited for, nor waits for in another thread: what
        that thread waits for may come in an iteration of later, and gloo wakes one of two waits.
        """
        for pending in list(self.in_flight.values()):
            if id(pending) not in map(id, list(self.waits.values())):
                pending.finish()

    def may_write(self) -> bool:
        """After close: whether any operation can still write into memory of the caller.

        Without connections an operation that is alone in its group (so it has been started) and
        whose threads sleep is one that gloo forgot to wake when its connection went: it can only
        end with the expiry of its timeout, as an error, and writes nothing any more.
        """
        if any(fabric.aborting() for fabric in list(self.fabrics.values())):
            return True
        if any(isinstance(one, Pending) for one in list(self.waits.values())):
            return True  # a thread has not left its wait yet
        works = {id(work): work for work in (*self.in_flight.values(), *self.abandoned)}
        stuck = [place for work in works.values() if (place := work.unfinished_in())]
        if not stuck:
            return False  # finished operations have no buffers left to receive into
        if not all(fabric.quiescent() for fabric in list(self.fabrics.values())):
            return True
        stuck = [place for place in stuck if not place.receives]
        alone = len({id(place.group) for place in stuck}) == len(stuck)
        threads = {place.waiter for place in stuck if place.waiter is not None}
        return bool(stuck) and not (alone and waiters.stays_asleep(threads))

    def ruin(self) -> str:
        """After close: why this process must not enter another epoch; empty when it may."""
        return next((why for fabric in list(self.fabrics.values()) if (why := fabric.ruin())), "")

    def take_leftovers(self) -> Leftovers:
        """Hand over everything that holds sockets, threads or memory."""
        works, fabrics = [*self.in_flight.values(), *self.abandoned], [*self.fabrics.values()]
        rest = Leftovers(works, self.groups, fabrics)
        self.in_flight, self.fabrics = {}, {}
        self.abandoned, self.groups = [], []
        return rest


class Observed:
    """The part of the communicators that tells what they wait in. Any thread."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._current: Epoch | None = None
        self._attaching: Epoch | None = None

    @property
    def _newest(self) -> Epoch | None:
        return self._attaching or self._current

    def waiting_for(self) -> tuple[str, str, int] | None:
        """(group, operation, sequence number) in which the main thread waits, or another one.

        Collectives and messages of a group are numbered separately, from 1 in each epoch: among
        the ranks of a group, the one with the lowest number keeps the others waiting.
        """
        waits = {} if (epoch := self._newest) is None else dict(epoch.waits)
        if not waits:
            return None
        work = waits.get(threading.main_thread().ident or 0) or next(iter(waits.values()))
        return work.place, work.operation, work.sequence

    def positions(self) -> Mapping[str, inner.Position] | None:
        """Return how far the device is with the operations of each group; None where waits hold the
        host, and :meth:`waiting_for` says it. Not often.
        """
        fabrics = [] if (epoch := self._newest) is None else list(epoch.fabrics.values())
        known = [found for one in fabrics if (found := one.positions()) is not None]
        return {place: one for found in known for place, one in found.items()} if known else None

    def look(self) -> None:
        """Report a fault that no thread has run into, once for an epoch."""
        if (epoch := self._current) is not None:
            for fabric in list(epoch.fabrics.values()):
                if (found := fabric.fault()) is not None and not epoch.closed:
                    epoch.report(*found)

    def begun(self) -> Mapping[str, inner.Begun]:
        """Return how many operations the host has begun, by group, where devices do not run
        them."""
        groups = [] if (epoch := self._newest) is None else list(epoch.groups)
        return {one.place: found for one in groups if (found := one.begun()) is not None}

    def progress(self) -> int:
        """Number of finished operations of this process."""
        return self._progress.finished

    def waited_seconds(self) -> float:
        """Return how long the main thread has waited in operations that block the host."""
        return self._progress.waited_seconds

    @property
    def stream_waits(self) -> StreamWaits:
        """Return how long streams wait in operations that do not block the host."""
        return self._progress.stream_waits


def trim_heap() -> None:
    """Give freed memory back to the kernel: glibc keeps freed message buffers otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Reaper:
    """Frees old epochs where blocking does no harm: in a thread, started with the first bundle.
    ``pending`` counts bundles not yet freed.

    Destroying a gloo group joins its worker thread, which may be stuck until the gloo timeout;
    torch releases the interpreter lock meanwhile. What an epoch holds is bounded by that timeout.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Leftovers] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.pending = 0

    def take(self, leftovers: Leftovers) -> None:
        """Free ``leftovers`` soon; the caller must keep no reference into them."""
        with self._lock:
            self.pending += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="deadpool-reaper", daemon=True
                )
                self._thread.start()
        self._inbox.put(leftovers)

    def _serve(self) -> None:
        while True:
            leftovers = self._inbox.get()
            _free(leftovers)
            trim_heap()
            with self._lock:
                self.pending -= 1


def _free(leftovers: Leftovers) -> None:
    # Late connections of an interrupted attach would keep a blocked constructor alive for long.
    for fabric in leftovers.fabrics:
        _try(fabric.abort)
    leftovers.works.clear()
    while leftovers.groups:
        _try(leftovers.groups.pop().close)
    while leftovers.fabrics:
        _try(leftovers.fabrics.pop().close)


def _try(step: Callable[[], object]) -> None:
    """A moment without descriptors or threads must not keep what else there is to free."""
    try:
        step()
    except Exception as error:
        print(
            f"deadpool: a part of an old epoch was not freed: {error!r}",
            file=sys.stderr,
            flush=True,
        )
