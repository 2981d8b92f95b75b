"""One epoch of communicators: its flag, its operations in flight, and its close."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, runtime_checkable

from deadpool_megatron.comms import inner
from deadpool_megatron.comms.in_flight import waiters
from deadpool_megatron.comms.in_flight.device_time import StreamWaits
from deadpool_megatron.comms.in_flight.waiters import WaiterPool
from deadpool_megatron.settings import flag_name

FaultCallback = Callable[[str, str, str], None]


@dataclass(frozen=True)
class UnfinishedOperation:
    """An unfinished operation: its inner group, and the abandoned thread that waits for it.

    ``receives``: the operation writes bytes straight from a connection.
    """

    group: object
    waiter: int | None
    receives: bool = False


@runtime_checkable
class Pending(Protocol):
    """An operation that was started and is not known to have ended."""

    def unfinished_in(self) -> UnfinishedOperation | None:
        """Return the operation if it can still write into its outputs; None if it is finished or
        only reads."""

    def finish(self) -> None:
        """Wait for the operation; the wait can be abandoned."""


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
    """A wait of a thread that is no operation of a group."""

    place: str
    operation: str
    sequence: int = 0


@dataclass
class Progress:
    """The number of finished operations over all epochs; a lost count under races does no harm.

    ``waited_seconds`` is the time of the main thread in operations whose wait blocks the host,
    ``stream_waits`` the time of streams in operations whose wait blocks the stream.
    """

    finished: int = 0
    waited_seconds: float = 0.0
    stream_waits: StreamWaits = field(default_factory=StreamWaits)


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds.

    ``operation_timeout_seconds`` bounds any gloo operation, and with it the life of the threads and
    sockets of an interrupted operation; ``long_operation_seconds`` bounds an operation that waits
    for long work of a peer (0: none). After a fault, a failed call waits ``close_wait_seconds`` for
    the close of the epoch. ``drain_seconds`` is the deadline of a drain, ``grace_seconds`` the time
    in which an interrupted wait may end normally.
    """

    operation_timeout_seconds: float = 60.0
    close_wait_seconds: float = 30.0
    drain_seconds: float = 5.0
    grace_seconds: float = 0.1
    long_operation_seconds: float = 0.0


@dataclass
class RetiredEpoch:
    """The resources of an epoch that is over, for the reaper."""

    works: list[Pending]
    groups: list[inner.InnerGroup]
    fabrics: list[inner.Fabric]


@dataclass(eq=False)
class Epoch:
    """State shared by all inner groups of an attach.

    ``closed`` is set once and never cleared. ``in_flight`` maps a serial number to an operation
    that no thread has finished waiting for, ``abandoned`` holds operations whose wait was
    abandoned, ``waits`` maps a thread id to its wait, ``ends`` holds the callbacks of the close.
    Dictionaries are only touched by single operations, atomic in CPython, so the hot path takes no
    lock.
    """

    number: int
    limits: Limits
    pool: WaiterPool
    progress: Progress
    on_fault: FaultCallback | None
    main_ident: int | None = field(default_factory=lambda: threading.main_thread().ident)
    #: whether an operation may have to wait for long work of a peer
    allows_long_waits: bool = False
    #: true at first: the first use of an operation may hold its thread for seconds
    in_first_step: bool = True
    closed: bool = False
    closed_at_seconds: float = 0.0
    serials: Iterator[int] = field(default_factory=itertools.count)
    in_flight: dict[int, Pending] = field(default_factory=dict)
    abandoned: list[Pending] = field(default_factory=list)
    waits: dict[int, Waiting] = field(default_factory=dict)
    ends: dict[int, Callable[[], None]] = field(default_factory=dict)
    fabrics: dict[str, inner.Fabric] = field(default_factory=dict)  # by transport
    groups: list[inner.InnerGroup] = field(default_factory=list)
    _closed_event: threading.Event = field(default_factory=threading.Event)
    _fault_lock: threading.Lock = field(default_factory=threading.Lock)
    _fault_reported: bool = False

    @property
    def grace_over(self) -> float:
        """The time (monotonic, seconds) at which abandoning a wait of the closed epoch is due."""
        return self.closed_at_seconds + self.limits.grace_seconds

    def close(self) -> None:
        """Set the flag, abort all fabrics, wake all waits. Any thread, any number of times."""
        if not self.closed:
            self.retire()
        # Waits are woken before the abort as well, since that of an NCCL fabric may take long.
        self.pool.wake_all()
        self.abort()
        self.pool.wake_all()
        for end in list(self.ends.values()):
            end()

    def retire(self) -> None:
        """Set the flag, for a planned change, without harming peers that may still be reading."""
        self.closed_at_seconds = time.monotonic()
        self.closed = True
        self._closed_event.set()

    def abort(self) -> None:
        """Abort all fabrics. The caller repeats this while connections may still be made."""
        for fabric in list(self.fabrics.values()):
            fabric.abort()

    def check(self, operation: str) -> None:
        """Raise EpochClosed if the epoch is closed."""
        if self.closed:
            raise inner.EpochClosed(self.number, operation)

    def fault(
        self, description: str, operation: str, text: str, wait_seconds: float | None = None
    ) -> NoReturn:
        """Report a failed communication, unless a fault was reported already; wait for the close,
        at most ``wait_seconds`` (by default the limit of this epoch); raise.

        Raises EpochClosed when the epoch is or gets closed, else CommunicatorFault.
        """
        if "Timed out" in text:
            setting = (
                "first_step_seconds" if self.allows_long_waits else "operation_timeout_seconds"
            )
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
        """Report the first fault of the epoch. Any thread."""
        with self._fault_lock:
            first, self._fault_reported = not self._fault_reported, True
        if first and self.on_fault is not None:
            self.on_fault(description, operation, text)

    def finish_in_flight(self) -> None:
        """Wait for every operation for which no thread is waiting.

        An operation for which another thread waits is left out: it may end in a later iteration,
        and gloo wakes only the first of two waits.
        """
        for pending in list(self.in_flight.values()):
            if id(pending) not in map(id, list(self.waits.values())):
                pending.finish()

    def may_write(self) -> bool:
        """After close: return whether any operation can still write into memory of the caller.

        Gloo forgets to wake some operations when their connection ends. Such an operation is alone
        in its group (so it has been started), its threads sleep, and there are no connections. It
        can only end with an error, at its timeout, and does not write any more.
        """
        if any(fabric.aborting() for fabric in list(self.fabrics.values())):
            return True
        if any(isinstance(wait, Pending) for wait in list(self.waits.values())):
            return True  # a thread has not left its wait yet
        works = {id(work): work for work in (*self.in_flight.values(), *self.abandoned)}
        stuck = [place for work in works.values() if (place := work.unfinished_in())]
        if not stuck:
            return False  # finished operations have no buffers left to receive into
        if not all(fabric.is_quiescent() for fabric in list(self.fabrics.values())):
            return True
        stuck = [place for place in stuck if not place.receives]
        alone = len({id(place.group) for place in stuck}) == len(stuck)
        threads = {place.waiter for place in stuck if place.waiter is not None}
        return bool(stuck) and not (alone and waiters.stays_asleep(threads))

    def unusable_reason(self) -> str:
        """After close: return the reason why this process must not enter another epoch, or
        nothing."""
        return next(
            filter(None, (fabric.unusable_reason() for fabric in list(self.fabrics.values()))), ""
        )

    def detach_resources(self) -> RetiredEpoch:
        """Return everything that holds sockets, threads or memory, and drop it here."""
        works, fabrics = [*self.in_flight.values(), *self.abandoned], [*self.fabrics.values()]
        retired = RetiredEpoch(works, self.groups, fabrics)
        self.in_flight, self.fabrics = {}, {}
        self.abandoned, self.groups = [], []
        return retired
