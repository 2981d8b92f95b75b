"""A member's link to its agent: it receives orders, sends reports and beats, never blocks training.

A watcher thread owns the reading side and sends a beat every ``beat_interval_seconds``. The main
thread waits for decisions in :meth:`MemberLink.wait_record`, and every other wait of the main
thread includes :attr:`MemberLink.interrupt_fd`, which is readable from the moment the current epoch
is closed (or the run is stopped) until the main thread has received the next record.

The agent's end of the socket closes only when the agent has ended; then this member ends at once,
because it is no longer supervised (the parent-death signal does the same, without a thread).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cluster.link.protocol import report_of
from deadpool_megatron.cluster.link.rendezvous import MemberStore
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.layout.records import EpochRecord, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.framing import FrameBuffer, encode, send_some, writable

_RECEIVE_BYTES = 1 << 16


class StopOrder(Exception):
    """The end of the run, with the reason as text. The member leaves its main function."""


@dataclass(frozen=True)
class Handlers:
    """Callbacks of the watcher thread; each must return soon and must not wait for the main thread.

    ``on_close(epoch, cause)`` runs after the interrupt is readable. ``status()`` returns the body
    of a beat: section, iteration, waiting ([group, operation, sequence] or None), progress, and
    the fields that member/role_reports.py adds when the process makes no progress.
    """

    on_close: Callable[[int, str], None]
    on_pause: Callable[[int], None]
    status: Callable[[], Mapping[str, Any]]
    on_durable: Callable[[int], None] = lambda iteration: None


class MemberLink:
    """The member's end of the link (see the module text). Any thread may call any method.

    ``wait_record`` is meant for one thread at a time (the main thread), because it clears the
    interrupt.
    """

    def __init__(
        self, connection: socket.socket, place: MemberPlace, run_id: str, settings: Settings
    ) -> None:
        self.place = place
        self.seat = Seat(place.node, place.local_rank, place.incarnation)
        self.run_id = run_id
        self.settings = settings
        self.interrupt_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.store = MemberStore(self.send)
        self._connection = connection
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._state = threading.Condition()
        self._retransmit_queue = bytearray()
        self._retransmit_lock = threading.Lock()
        self._record: EpochRecord | None = None
        self.closed_epoch = 0  # the newest closed epoch
        self._stop_reason: str | None = None
        self._handlers: Handlers | None = None
        self._thread: threading.Thread | None = None
        self._leaving = False
        self._status_failed = False

    @staticmethod
    def from_environment() -> MemberLink:
        """Return the link whose socket the agent handed over.

        Raises RuntimeError when this process was not started by an agent.
        """
        place = MemberPlace.from_environment()
        connection = socket.socket(fileno=place.agent_fd)
        settings = Settings.from_environment(os.environ)
        return MemberLink(connection, place, os.environ["DEADPOOL_RUN_ID"], settings)

    def start(self, handlers: Handlers) -> None:
        """Send the hello and start the watcher thread."""
        self._handlers = handlers
        self._connection.setblocking(False)
        self.send({"t": "hello", "pid": os.getpid()})
        self._thread = threading.Thread(target=self._watch, name="deadpool-link", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send or queue one message, in order; never blocks."""
        with self._retransmit_lock:
            self._retransmit_queue += encode(message)
            send_some(self._connection, self._retransmit_queue)
        if self._retransmit_queue:
            os.eventfd_write(self._wake_fd, 1)

    def send_event(self, event: Event) -> None:
        """Report an event to the coordinator, the only writer of the event file."""
        self.send(report_of(event))

    def wait_record(self, after_epoch: int, deadline_seconds: float | None = None) -> EpochRecord:
        """Wait for the record of an open epoch newer than ``after_epoch``, and clear the interrupt
        under the same lock.

        Raises StopOrder when the run is over, and TimeoutError after ``deadline_seconds`` (None:
        only for spares, whose agent and coordinator have deadlines of their own).
        """
        with self._state:
            if not self._state.wait_for(lambda: self._is_wait_over(after_epoch), deadline_seconds):
                raise TimeoutError(
                    f"no record newer than epoch {after_epoch} within {deadline_seconds:g} s"
                )
            if self._stop_reason is not None:
                raise StopOrder(self._stop_reason)
            assert self._record is not None
            _clear(self.interrupt_fd)
            return self._record

    def _is_wait_over(self, after_epoch: int) -> bool:
        if self._stop_reason is not None:
            return True
        record = self._record
        return record is not None and record.epoch > max(after_epoch, self.closed_epoch)

    @property
    def stopped(self) -> bool:
        """Return whether the run is over."""
        return self._stop_reason is not None

    def flush(self, deadline_seconds: float) -> bool:
        """Wait until everything queued has been sent; False after the deadline."""
        limit = time.monotonic() + deadline_seconds
        while True:
            with self._retransmit_lock:
                send_some(self._connection, self._retransmit_queue)
                if not self._retransmit_queue:
                    return True
            seconds = limit - time.monotonic()
            if seconds <= 0:
                return False
            writable(self._connection.fileno(), seconds)

    def close(self) -> None:
        """Stop the watcher thread. The process must end soon, as the agent takes the lack of beats
        for a freeze."""
        self._leaving = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            self._thread.join(self.settings.drain_seconds)

    # The watcher thread.

    def _watch(self) -> None:
        frames = FrameBuffer()
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        due = 0.0
        while not self._leaving:
            now = time.monotonic()
            if now >= due:
                self._beat()
                due = now + self.settings.beat_interval_seconds
            wanted = select.POLLIN | (select.POLLOUT if self._retransmit_queue else 0)
            poller.register(self._connection, wanted)
            for handle, events in poller.poll(max(0.0, due - time.monotonic()) * 1000):
                if handle == self._wake_fd:
                    _clear(self._wake_fd)
                elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._read(frames)
            with self._retransmit_lock:
                send_some(self._connection, self._retransmit_queue)

    def _read(self, frames: FrameBuffer) -> None:
        try:
            piece = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            piece = b""
        if not piece:
            if not self._leaving:
                os._exit(ExitStatus.AGENT_LOST)
            return
        for message in frames.feed(piece):
            self._handle(message)

    def _handle(self, message: Mapping[str, Any]) -> None:
        assert self._handlers is not None
        kind = message.get("t")
        if kind == "store":
            self.store.take(message)
        elif kind == "close":
            self._on_close(int(message["epoch"]), str(message["cause"]))
        elif kind == "record":
            self._on_record(EpochRecord.from_dict(message["record"]))
        elif kind == "stop":
            with self._state:
                self._stop_reason = str(message.get("reason", ""))
                os.eventfd_write(self.interrupt_fd, 1)
                self._state.notify_all()
        elif kind == "pause":
            record = self._record
            if record and self.closed_epoch < record.epoch == message["epoch"]:
                self._handlers.on_pause(int(message["iteration"]))
        elif kind == "durable-done":
            self._handlers.on_durable(int(message["iteration"]))

    def _on_close(self, epoch: int, cause: str) -> None:
        assert self._handlers is not None
        with self._state:
            if epoch <= self.closed_epoch:
                return  # a duplicate, as after a reconnect of the agent
            self.closed_epoch = epoch
            os.eventfd_write(self.interrupt_fd, 1)
        self.store.close(epoch)
        self._handlers.on_close(epoch, cause)

    def _on_record(self, record: EpochRecord) -> None:
        with self._state:
            newest = 0 if self._record is None else self._record.epoch
            if record.epoch <= max(newest, self.closed_epoch):
                return
            self._record = record
            self._state.notify_all()

    def _beat(self) -> None:
        assert self._handlers is not None
        try:
            status = self._handlers.status()
        except Exception as error:
            # An error in status() must not look like a frozen process; it is reported once.
            status = {"section": "unknown", "iteration": 0, "waiting": None, "progress": 0}
            if not self._status_failed:
                self._status_failed = True
                text = f"status of member {self.seat.to_list()} failed: {error!r}"
                self.send_event(Event(Kind.LOG, data={"level": "error", "text": text}))
        self.send({"t": "beat", **status})


def _clear(event_fd: int) -> None:
    with contextlib.suppress(BlockingIOError):  # it was not set
        os.eventfd_read(event_fd)


class PausePoint:
    """The planned pause of all roles after the same iteration, whose generation is protected.
    Thread-safe.

    The order comes on the watcher thread while the main thread trains, so a role may already be in
    the next iteration. The role must report this at once, as it cannot finish that iteration
    without the roles that pause. The coordinator then orders a later iteration, and the pausing
    roles continue to it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._started = 0

    def order(self, iteration: int) -> int | None:
        """Set the iteration after which to pause (the latest order counts).

        Returns the iteration that has already started if the order is too late, else None.
        """
        with self._lock:
            if self._started > iteration:
                self._wanted = None
                return self._started
            self._wanted = iteration
            return None

    def may_start(self, iteration: int) -> bool:
        """Return whether ``iteration`` may start. Once this has returned true, an order to pause
        before the iteration is too late. While it returns false, the caller pauses and repeats the
        call.
        """
        with self._lock:
            if self._wanted is not None and self._wanted < iteration:
                return False
            self._started = iteration
            return True

    def reset(self) -> None:
        """Forget all orders and started iterations, because the epoch is over."""
        with self._lock:
            self._wanted = None
            self._started = 0
