"""The vault process: its threads, and the orders of the agent.

The main thread waits for the end. ``accept-local`` accepts the members and the agent, each of which
a ``local-*`` serves; ``accept-vaults`` and a ``serve-*`` for each do the same for other vaults.
Each role seated here has a ``role-*``, and a ``ship-*`` for each of its buddies and each parity
block that it is part of, or a ``double-*`` for its second copy. While copies wait for their pace,
``watch-link`` watches for traffic of training. In addition, ``block-*-from-*`` fetches a block to
decode from, ``block-*`` requests the missing contributions to a block, ``load-code`` imports the
modules for decoding, and ``dump`` and ``take`` carry out the slow orders.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron import ownership
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.file_systems import LIKELY_CLEANERS
from deadpool_megatron.layout.records import EpochRecord, Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import member_connection, slot_memory
from deadpool_megatron.vault.disk.dump import damaged_parts, dump, dump_held
from deadpool_megatron.vault.disk.pinned_snapshot import snapshot_bytes, take
from deadpool_megatron.vault.errors import MALFORMED, Code, VaultError
from deadpool_megatron.vault.peer_server import Server
from deadpool_megatron.vault.role_worker import RoleWorker
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.shm.segment import Segment, parse_name
from deadpool_megatron.vault.slot_store import SlotStore
from deadpool_megatron.vault.transport import Transport, begin_thread
from deadpool_megatron.wire.framing import WireError

log = logging.getLogger(__name__)
_MAX_KEPT_EVENTS = 1000
_NAMES_SECONDS = 10.0


class Vault:
    """A node's vault; all its slots are in ``directory``."""

    def __init__(
        self,
        node: int,
        directory: Path,
        settings: Settings,
        local_listener: socket.socket,
        *transports: Transport,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._settings = settings
        self._transports = transports
        self.store = store = SlotStore(
            scheme_of, node, directory, settings, self._emit, *transports
        )
        self._gate = store.gate
        self._ledger = store.ledger
        self._members = member_connection.MemberConnections(self.store)
        self._server = Server(self.store, *transports)
        self._local_server = member_connection.LocalServer(local_listener, self._serve_local)
        self._order_lock = threading.Lock()
        self._event_lock = threading.Lock()
        self._agent: member_connection.LocalLink | None = None
        self._alone_since = time.monotonic()
        self._kept_events: collections.deque[Event] = collections.deque(maxlen=_MAX_KEPT_EVENTS)
        self._damaged: set[tuple[Segment, int, str, int]] = set()
        self._stop = threading.Event()
        self._remove = False
        self._names_message = ""
        self.ended_by_signal = False

    def start(self) -> None:
        """Find the slots of an earlier vault, and start to serve, without an open epoch.

        Raises SegmentError when there are slots that it cannot read.
        """
        with self._gate.lock:
            found = self.store.table.scan()
            self.store.table.require_read()
        for name, damage in self.store.table.dropped.items():
            about = (parse_name(name)[0], Generation(0, 0), "description", name)
            self.store.reports.corruption(*about, damage.expected, damage.found)
        self._report_damage()
        data = {"pid": os.getpid(), "slots_found": found}
        self._emit(Event(Kind.VAULT_STARTED, node=self._gate.node, data=data))
        self._server.start()
        self._local_server.start()

    def wait(self) -> None:
        """Wait for the order to stop, or until the agent is away for too long; then shut down."""
        checked_at = time.monotonic()
        while not self._stop.wait(timeout=0.2) and not self.ended_by_signal:
            slot_memory.remove_unneeded(self.store)
            self.store.table.removed.clear()
            if time.monotonic() - checked_at > _NAMES_SECONDS:
                checked_at = time.monotonic()
                self._keep_names()
            with self._event_lock:
                alone = self._agent is None
            if alone and time.monotonic() - self._alone_since > self._settings.restore_seconds:
                log.warning("no agent for %g s: the end", self._settings.restore_seconds)
                break
        self._cut()
        self._stop_listening()
        self._local_server.stop()
        if self._remove:
            shutil.rmtree(self._directory, ignore_errors=True)
            parent = self._directory.parent
            if parent.name.startswith("deadpool-"):  # the last node removes the run's directory
                with contextlib.suppress(OSError):
                    parent.rmdir()

    def _stop_listening(self) -> None:
        self._server.stop()
        for transport in self._transports:
            transport.close()

    def stop(self, remove: bool = False) -> None:
        """End :meth:`wait`. Not for signal handlers, which set ``ended_by_signal``."""
        self._remove = self._remove or remove
        self._stop.set()

    def _keep_names(self) -> None:
        """Restore names that another program has removed, by links to the open files, because the
        next vault and new members find the files by name."""
        try:
            with self._gate.lock:
                for directory in (self._directory.parent, self._directory):
                    if not directory.exists():
                        ownership.make_private(directory)
                restored = [s for s in self.store.table.segments.values() if s.keep_name()]
                if not self._local_server.keep_name() and not restored:
                    return
            outcome = "created again; from here on its memory goes with this node's vault"
        except (OSError, ownership.OwnershipError) as error:
            outcome = f"and cannot be created again: {error}"
        text = f"names in {self._directory} were removed, {LIKELY_CLEANERS}: {outcome}"
        if text != self._names_message:
            self._names_message = text
            self.store.reports.warn(text)

    # Local connections.

    def _serve_local(self, link: member_connection.LocalLink, stopping: threading.Event) -> None:
        hello = link.receive(stopping)
        if hello is None:
            return
        if hello.get("t") == "member":
            member_connection.MemberConnection(self.store, self._members, link, hello).run(stopping)
        elif hello.get("t") == "agent":
            self._serve_agent(link, stopping)
        else:
            raise WireError(f"first message is {hello.get('t')!r}")

    def _emit(self, event: Event) -> None:
        with self._event_lock:
            if self._agent is None:
                self._kept_events.append(event)
            else:
                self._agent.send({"t": "event", "event": event.to_dict()})

    def _serve_agent(self, link: member_connection.LocalLink, stopping: threading.Event) -> None:
        with self._event_lock:
            self._agent = link
            while self._kept_events:
                link.send({"t": "event", "event": self._kept_events.popleft().to_dict()})
        try:
            while (message := link.receive(stopping)) is not None:
                self._execute(link, message)
        finally:
            with self._event_lock:
                if is_newest := self._agent is link:
                    self._agent, self._alone_since = None, time.monotonic()
            if is_newest:
                # The agent holds the listening socket open, too. Once both have closed it, refused
                # connections prove to a new coordinator that the agent has ended.
                self._stop_listening()

    def _execute(self, link: member_connection.LocalLink, message: Mapping[str, Any]) -> None:
        kind, number = str(message.get("t")), message.get("id")
        orders: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "close": lambda m: self.close_epoch(int(m["epoch"])),
            "inventory": lambda _: self.store.inventory().to_dict(),
            "adopt": lambda m: self.adopt(EpochRecord.from_dict(m["record"])),
            "status": lambda _: self.status(),
            "dump": self._dump,
            "take": self._take,
            "shutdown": lambda m: self.stop(bool(m["remove"])),
        }

        def answer() -> None:
            try:
                reply: dict[str, Any] = {"ok": True, "value": orders[kind](message)}
            except (VaultError, OSError, *MALFORMED) as error:
                log.warning("order %s: %s: %s", kind, type(error).__name__, error)
                code = error.code if isinstance(error, VaultError) else Code.FAILED
                reply = {"ok": False, "code": code, "text": f"{kind}: {error}"}
            link.send({"t": "reply", "id": number, **reply})

        if kind in ("dump", "take"):  # these are slow, and an order to close must not wait for them
            begin_thread(kind, answer)
        else:
            answer()

    # Orders.

    def close_epoch(self, epoch: int) -> None:
        """Close an epoch; after the return no part of it is sealed on this node."""
        with self._order_lock:
            newer_open = self._gate.open_epoch > epoch
            self.store.close(epoch)
            if not newer_open:
                self._cut()

    def adopt(self, record: EpochRecord) -> None:
        """Drop abandoned generations, open the record's epoch, start to restore and re-protect.

        This is idempotent. Raises VaultError for the record of a closed epoch.
        """
        self._keep_names()  # the names under which copies and slots are made
        with self._order_lock:
            if self._gate.open_epoch not in (0, record.epoch):
                self._cut()
            if not self.store.adopt(record):
                return
            self.store.table.removed.clear()  # the slots of new roles may need the memory
            workers = {
                role: RoleWorker(self.store, record, role, seat)
                for role, seat in self._gate.own_roles().items()
            }
            self._members.set_workers(workers)
            for worker in workers.values():
                worker.start()

    def status(self) -> dict[str, Any]:
        """Return epoch, counters, commits, memory and CPU time (seconds), for users and tests."""
        self._report_damage()
        store = self.store
        usage = resource.getrusage(resource.RUSAGE_SELF)
        speed, origin = store.nic.speed()
        with self._gate.lock:
            return {
                "node": self._gate.node,
                "pid": os.getpid(),
                "open_epoch": self._gate.open_epoch,
                "closed_epoch": self._gate.closed_epoch,
                "counters": dict(store.reports.counters),
                "committed": {
                    str(role): [generation.to_list(), boundary]
                    for role, (generation, boundary) in self._ledger.committed.items()
                },
                "fit": {str(role): fit for role, fit in store.nic.fits().items()},
                "link": {"bytes_per_second": speed, "origin": origin} if speed else None,
                "segments": {
                    **{n: s.nbytes for n, s in store.table.segments.items()},
                    **snapshot_bytes(self._directory),
                },
                "holdings": [holding.to_dict() for holding in store.table.holdings()],
                "allocated_bytes": store.table.budget.used_bytes(),
                "limit_bytes": store.table.budget.limit_bytes,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
            }

    def _report_damage(self) -> None:
        """Report each invalid state word once: it comes from a stray write or from bad memory."""
        with self._gate.lock:
            segments = list(self.store.table.segments.values())
            found = {(segment, *word) for segment in segments for word in segment.invalid_states()}
        for segment, slot, name, word in found - self._damaged:
            generation, where = segment.generation(slot), f"header of slot {slot}"
            role, where = segment.layout.role, f"{where} of {segment.path.name}"
            self.store.reports.corruption(role, generation, name, where, 0, word)
        self._damaged = found

    def _dump(self, message: Mapping[str, Any]) -> dict[str, Any]:
        store, directory = self.store, Path(message["directory"])
        if held := [Generation.from_list(values) for values in message["held"]]:
            # Only intact parts are written. Damaged parts are not reported, as no source is left.
            return {"files": dump_held(store, directory, held)}
        files = dump(
            store, directory, Generation.from_list(message["generation"]), message["boundary"]
        )
        return {"files": files, "damaged": [part.to_list() for part in damaged_parts(store)]}

    def _take(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        name, iteration = str(message["name"]), int(message["iteration"])
        taken = take(self.store, name, iteration, float(message["limit_seconds"]))
        return [snapshot.to_dict() for snapshot in taken]

    def _cut(self) -> None:
        """Break every connection to and from other vaults, and signal the workers to end."""
        for worker in self._members.workers.values():
            worker.cut()
        self._server.cut()
        with self._gate.lock:
            self._ledger.cut()
