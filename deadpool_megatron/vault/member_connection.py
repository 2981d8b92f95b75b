"""The vault's side of a member's connection: registration, seals, restores.

Members connect to the vault's AF_UNIX socket, as the agent does. A named thread reads each
connection. Sending never waits for the other side, since a stopped member must not delay any
commit: bytes that the socket does not accept at once are kept and sent as it drains, and a
connection with too many kept bytes is cut. Its member connects again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_megatron.file_systems import HeldName
from deadpool_megatron.layout.records import Generation, RoleLayout, Seat
from deadpool_megatron.vault import slot_memory
from deadpool_megatron.vault.errors import MALFORMED, Code, Refusal, RestoreUnavailable, VaultError
from deadpool_megatron.vault.role_worker import RoleWorker
from deadpool_megatron.vault.shared_nic import Pace
from deadpool_megatron.vault.shm.segment import own_name
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore
from deadpool_megatron.vault.transport import begin_thread
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError

log = logging.getLogger(__name__)
_MAX_KEPT_BYTES = 64 << 20
_MESSAGE_SECONDS = 20.0
_BACKLOG = 512


class MemberConnections:
    """All members that are connected, by role. Thread-safe."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._connections: dict[int, MemberConnection] = {}
        self.workers: Mapping[int, RoleWorker] = {}
        # Role -> report of damage that was found while the member was not connected. The member
        # ignores a report of another epoch.
        self._unsent_reports: dict[int, dict[str, Any]] = {}
        store.ledger.on_committed = self._report_committed
        store.on_bad = self._report_bad

    def set_workers(self, workers: Mapping[int, RoleWorker]) -> None:
        """Set the workers of a newly opened epoch, and hand waiting members to them."""
        with self._lock:
            self.workers = workers
            connections = list(self._connections.values())
        for connection in connections:
            connection.resume()

    def enter(self, connection: MemberConnection) -> None:
        """Note that a member has registered; the newest connection of a role replaces others."""
        with self._lock:
            self._connections[connection.role] = connection
            report = self._unsent_reports.pop(connection.role, None)
        if report is not None:
            connection.link.send(report)

    def leave(self, connection: MemberConnection) -> None:
        """Note that a connection has ended."""
        with self._lock:
            if self._connections.get(connection.role) is connection:
                del self._connections[connection.role]

    def _report_committed(self, role: int, generation: Generation, boundary: str) -> None:
        with self._lock:
            connection = self._connections.get(role)
        if connection is not None:
            connection.push_committed(generation, boundary)

    def _report_bad(self, epoch: int, role: int, generation: Generation, part: str) -> None:
        report = {"t": "bad", "epoch": epoch, "generation": generation.to_list(), "part": part}
        with self._lock:
            connection = self._connections.get(role)
            if connection is None:
                self._unsent_reports[role] = report
        if connection is not None:
            connection.link.send(report)


class MemberConnection:
    """A connection of a member, from its ``member`` message on."""

    def __init__(
        self,
        store: SlotStore,
        members: MemberConnections,
        link: LocalLink,
        hello: Mapping[str, Any],
    ) -> None:
        self._store = store
        self._gate = store.gate
        self._ledger = store.ledger
        self._members = members
        self.link = link
        self.layout = RoleLayout.from_dict(hello["layout"])
        self.role = self.layout.role
        self._seat = Seat.from_list(hello["seat"])
        self._has_slots = bool(hello["has_slots"])
        self._request: Mapping[str, Any] | None = None
        self._pinned: list[Place] = []
        self._over = False
        self._lock = threading.Lock()

    def run(self, stopping: threading.Event) -> None:
        """Serve the member until the vault stops. Raises WireError or OSError at the end of the
        stream."""
        self._members.enter(self)
        try:
            if self._attach():
                self._confirm()
            while (message := self.link.receive(stopping)) is not None:
                self._handle(message)
        finally:
            self._members.leave(self)
            with self._lock:
                self._over = True
            self._unpin()

    def push_committed(self, generation: Generation, boundary: str) -> None:
        """Report to the member that a generation is committed at a boundary."""
        about = {"epoch": self._gate.open_epoch, "generation": generation.to_list()}
        self.link.send({"t": "committed", **about, "boundary": boundary})

    def _attach(self) -> bool:
        """Map the member's segment; create it unless the member uses it already."""
        try:
            if self._has_slots:
                self._store.attach(own_name(self.role, self._seat))
            else:
                slot_memory.ensure_own(self._store, self.layout, self._seat)
        except (VaultError, OSError) as error:
            text = f"segment of role {self.role}: {error}"
            code = error.code if isinstance(error, VaultError) else Code.FAILED
            self.link.send({"t": "unregistered", "code": code, "text": text})
            return False
        return True

    def _confirm(self) -> None:
        """Confirm a registration, and report the newest commit, if any."""
        self.link.send({"t": "registered"})
        with self._gate.lock:
            if self._gate.own_roles().get(self.role) != self._seat or not self._gate.open_epoch:
                return
            if (committed := self._ledger.committed.get(self.role)) is not None:
                self.push_committed(*committed)
        worker = self._members.workers.get(self.role)
        if worker is not None:
            worker.wake()

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message.get("t")
        if kind == "filled":
            worker = self._members.workers.get(self.role)
            if worker is not None:
                worker.seal()  # in this thread: the worker's would have to wake up first
        elif kind == "restore":
            self._request = message
            self.resume()
        elif kind == "waiting":
            if self._gate.is_open(int(message["epoch"])):
                awaited = Generation.from_list(message["generation"])
                self._store.nic.note(Pace.waits, self.role, awaited)
        elif kind == "ended":
            with self._gate.changed:
                if self._gate.is_open(int(message["epoch"])):
                    self._ledger.ended.add(self.role)
                    self._gate.changed.notify_all()
        elif kind == "release":
            self._unpin()
        else:
            raise WireError(f"unknown message {kind!r} from the member of role {self.role}")

    # Restoring.

    def resume(self) -> None:
        """Hand the member's request for a restore to the worker of the request's epoch; do nothing
        while that worker does not exist yet."""
        worker = self._members.workers.get(self.role)
        with self._lock:
            request = self._request
            if request is None:
                return
            epoch = int(request["epoch"])
            refusal = self._gate.judge(epoch)
            ready = worker is not None and worker.epoch == epoch
            if refusal is Refusal.EARLY or (refusal is None and not ready):
                return
            self._request = None
        if refusal is Refusal.STALE or worker is None:
            self._answer(epoch, VaultError(f"epoch {epoch} is over"))
        else:
            record = self._gate.record
            start = Generation.from_list(request["generation"]), request["boundary"]
            if record is None or start != (record.restore.generation, record.restore.boundary):
                self._answer(epoch, VaultError(f"epoch {epoch} does not start from {start}"))
            elif record.seats.get(self.role) != self._seat:
                # Parts are restored into the slots of the process that has the seat.
                text = f"another process plays role {self.role} in epoch {epoch}"
                self._answer(epoch, VaultError(text))
            elif record.restore.kind not in ("memory", "dump"):
                self._answer(epoch, VaultError(f"epoch {epoch} starts from {record.restore.kind}"))
            else:
                worker.restore_for(self.layout, partial(self._answer, epoch))

    def _answer(self, epoch: int, outcome: dict[str, Place] | VaultError) -> None:
        """Answer a request of ``epoch``; the member may be in a newer epoch by now."""
        about: dict[str, Any] = {"epoch": epoch}
        if isinstance(outcome, RestoreUnavailable):
            about |= {"t": "unavailable", "part": outcome.part, "tried": outcome.tried}
            self.link.send(about)
        elif isinstance(outcome, VaultError):
            failed = {"t": "failed", "code": outcome.code, "text": str(outcome)}
            self.link.send(about | failed)
        else:
            with self._gate.lock:
                for place in outcome.values():
                    self._store.table.pin(place)
            with self._lock:
                self._pinned += outcome.values()
                over = self._over
            if over:  # the member has died meanwhile, so it will never release these pins
                self._unpin()
                return
            parts = {
                name: [at.segment.path.name, at.segment.offset(at.slot, at.name), at.nbytes]
                for name, at in outcome.items()
            }
            self.link.send({"t": "restored", **about, "parts": parts})

    def _unpin(self) -> None:
        with self._lock:
            pinned, self._pinned = self._pinned, []
        with self._gate.lock:
            for place in pinned:
                self._store.table.unpin(place)


class LocalLink:
    """A local connection. Any thread may call :meth:`send` and :meth:`close`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(_MESSAGE_SECONDS)
        # A timeout belongs to the Python object: senders use a second object, and never wait.
        self._sender = connection.dup()
        self._sender.settimeout(0)
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._closed = False

    def send(self, *messages: Mapping[str, Any]) -> None:
        """Send frames after those that were kept, and keep the bytes that the socket does not
        accept now. Does nothing on a broken connection."""
        with self._lock:
            if self._closed:
                return
            for message in messages:
                self._kept += framing.encode(message)
            framing.send_some(self._sender, self._kept)
            if len(self._kept) > _MAX_KEPT_BYTES:
                log.warning("a local connection does not read: cut")
                self._shutdown()

    def receive(self, stopping: threading.Event) -> dict[str, Any] | None:
        """Return the next frame; None when the vault stops. Sends kept bytes meanwhile. Raises
        WireError or OSError."""
        while not stopping.is_set():
            with self._lock:
                events = select.POLLIN | (select.POLLOUT if self._kept else 0)
            poll = select.poll()
            poll.register(self._socket, events)
            for _, event in poll.poll(500):
                if event & select.POLLOUT:
                    self.send()
                if event & ~select.POLLOUT:
                    return framing.receive(self._socket)
        return None

    def close(self) -> None:
        """Cut the connection."""
        with self._lock:
            self._shutdown()
            self._socket.close()
            self._sender.close()

    def _shutdown(self) -> None:
        self._closed = True
        self._kept.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def listening_at(path: Path) -> socket.socket:
    """Return a socket of this user that listens at ``path``, which it replaces."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    return listener


class LocalServer:
    """Accepts local connections and runs ``serve(link, stopping)`` for each in a thread."""

    def __init__(
        self, listener: socket.socket, serve: Callable[[LocalLink, threading.Event], None]
    ) -> None:
        self._listener = listener
        self._serve = serve
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._accept, name="accept-local", daemon=True)
        self._path = Path(listener.getsockname())
        self._name = HeldName(self._path, self._listen_again)

    def start(self) -> None:
        """Begin to accept connections."""
        self._thread.start()

    def keep_name(self) -> bool:
        """Listen again if the name was removed; return whether it was. Raises OSError."""
        return self._name.look()

    def _listen_again(self) -> None:
        self._listener = listening_at(self._path)  # the old queue is empty

    def stop(self) -> None:
        """Accept no more; the threads of open connections end within a second."""
        self._stopping.set()
        self._thread.join(timeout=2.0)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            connection: socket.socket | None = None
            try:
                self._listener.settimeout(0.5)
                connection, _ = self._listener.accept()
                link = LocalLink(connection)  # takes a second descriptor
            except TimeoutError:
                continue
            except OSError as error:  # for example, no file descriptor is left
                log.warning("accept: %s", error)
                if connection is not None:
                    connection.close()
                self._stopping.wait(0.1)
                continue
            begin_thread(f"local-{next(self._numbers)}", partial(self._run, link))

    def _run(self, link: LocalLink) -> None:
        try:
            self._serve(link, self._stopping)
        except framing.ConnectionClosed:
            pass
        except (WireError, VaultError, OSError, *MALFORMED) as error:
            log.warning("%s: %s: %s", threading.current_thread().name, type(error).__name__, error)
        finally:
            link.close()
