"""Requests of other vaults: keep a copy, hand out a part, describe a role.

Each connection has a named thread. The epoch is checked before the first byte of a part and, under
the lock that closing takes, again after the last byte. Bytes arrive directly in the slot and are
check-summed as they arrive. Refused messages are counted and reported; the answer contains only
the reason.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import xxhash

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault import slot_memory, transport as transports
from deadpool_megatron.vault.copies import Offer
from deadpool_megatron.vault.errors import MALFORMED, NORMAL_REFUSALS, Refusal, Refused, VaultError
from deadpool_megatron.vault.shm.segment import Segment
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore
from deadpool_megatron.vault.transport import HANDSHAKE_SECONDS, Channel, Transport, begin_thread
from deadpool_megatron.wire.framing import ConnectionClosed, WireError

log = logging.getLogger(__name__)
# A connection is unauthenticated until its peer has proved to know the run secret. Above this
# number of such connections, others wait in the kernel's queue.
_MAX_UNAUTHENTICATED = 64
_UNAUTHENTICATED_SECONDS = HANDSHAKE_SECONDS
# The time limit for the proof while the number of connections is at its maximum.
_CROWDED_SECONDS = 0.5
_PAUSE_SECONDS = 0.02


class Server:
    """Accepts and serves the connections of other vaults."""

    def __init__(self, store: SlotStore, *transports: Transport) -> None:
        self._store = store
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._unauthenticated: dict[Channel, float] = {}  # monotonic time of arrival, in that order
        self._threads = [
            threading.Thread(target=self._accept, args=[each], name="accept-vaults", daemon=True)
            for each in transports
        ]

    def start(self) -> None:
        """Begin to accept connections."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Cut all connections and accept no more."""
        self._stopping.set()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=2.0)

    def cut(self) -> None:
        """End every connection: their epoch has been closed."""
        with self._lock:
            for channel in self._channels:
                channel.shutdown()

    def _accept(self, transport: Transport) -> None:
        while not self._stopping.is_set():
            if not self._has_capacity():
                self._stopping.wait(_PAUSE_SECONDS)
                continue
            try:
                channel = transport.accept(0.5)
            except OSError as error:  # for example, no file descriptor is left
                log.warning("accept: %s", error)
                self._stopping.wait(0.1)
                continue
            if channel is None:
                continue
            with self._lock:
                self._channels.add(channel)
                self._unauthenticated[channel] = time.monotonic()
            begin_thread(f"serve-{next(self._numbers)}", partial(self._serve, channel))

    def _has_capacity(self) -> bool:
        """Close unauthenticated connections whose time is over; False when too many are left."""
        with self._lock:
            crowded = len(self._unauthenticated) >= _MAX_UNAUTHENTICATED
            limit = _CROWDED_SECONDS if crowded else _UNAUTHENTICATED_SECONDS
            began = time.monotonic() - limit
            late = [channel for channel, at in self._unauthenticated.items() if at < began]
            for channel in late:
                del self._unauthenticated[channel]
                channel.shutdown()  # so authenticate() fails in its thread, which reports the error
            return len(self._unauthenticated) < _MAX_UNAUTHENTICATED

    def _serve(self, channel: Channel) -> None:
        try:
            try:
                channel.authenticate()
            except (OSError, WireError) as error:
                self._store.reports.refuse("connection", why_exactly=error)
                return
            finally:
                with self._lock:
                    self._unauthenticated.pop(channel, None)
            connection = _Connection(self._store, channel)
            while not self._stopping.is_set():
                if channel.readable(1.0):
                    connection.handle(channel.receive())
        except ConnectionClosed:
            pass
        except WireError as error:
            self._store.reports.refuse("connection", why_exactly=error)
        except MALFORMED as error:
            self._store.reports.refuse("malformed message", why_exactly=repr(error))
        except (OSError, VaultError) as error:
            log.info("%s: %s", threading.current_thread().name, error)
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()


class _Connection:
    """The connection of an authenticated vault."""

    def __init__(self, store: SlotStore, channel: Channel) -> None:
        self._store = store
        self._gate = store.gate
        self._ledger = store.ledger
        self._channel = channel
        self._layout: RoleLayout | None = None

    def handle(self, message: Mapping[str, Any]) -> None:
        """Answer one message. Raises WireError for an unknown type."""
        try:
            self._answer(message)
        except Refused as refused:
            if refused.reason not in NORMAL_REFUSALS:
                about = {key: message[key] for key in ("node", "role", "epoch") if key in message}
                self._store.reports.refuse(str(refused), **about)
            self._channel.send({"t": "refused", "why": str(refused.reason), "about": refused.about})

    def _answer(self, message: Mapping[str, Any]) -> None:
        kind = message.get("t")
        if kind == "offer":
            self._channel.lower_priority(self._store.settings.dscp)
            self._layout = RoleLayout.from_dict(message["layout"])
        elif kind == "put" and message.get("block") is not None:
            offer = self._offer(message)
            scheme, block = self._ledger.require_scheme(offer.epoch), int(message["block"])
            scheme.combine(self._channel, block, offer)
        elif kind == "put":
            self._put(message)
        elif kind == "fetch":
            self._fetch(message)
        elif kind == "lanes":
            lanes = self._gate.lanes.lanes
            self._channel.send({"t": "lanes", "lanes": [lane.transport.address for lane in lanes]})
        elif kind == "describe":
            self._describe(message)
        else:
            raise WireError(f"unknown message {kind!r}")

    # Keeping a copy.

    def _put(self, message: Mapping[str, Any]) -> None:
        offer, store = self._offer(message), self._store
        with self._gate.lock:
            needed = [
                (name, size, digest)
                for name, (size, digest) in offer.parts.items()
                if not any(
                    (place.nbytes, place.checksum) == (size, digest)
                    for place in store.table.find(offer.role, offer.generation, name)
                )
            ]
        wanted = [name for name, _, _ in needed]
        have = [name for name in offer.names if name not in wanted]
        if needed:
            have += self._request_parts(offer, needed, wanted)
        else:
            self._channel.send({"t": "need", "parts": []})
        if not self._gate.is_open(offer.epoch):
            raise Refused(Refusal.STALE)
        self._channel.send({"t": "sealed", "parts": have})

    def _request_parts(
        self, offer: Offer, needed: list[tuple[str, int, int]], wanted: list[str]
    ) -> list[str]:
        """Request the parts that are not here. Return the names of the parts that were received and
        sealed."""
        store, generation = self._store, offer.generation
        if slot_memory.own_slots_missing(store):
            raise Refused(Refusal.EARLY)
        try:
            segment = slot_memory.ensure_copy(store, offer.layout, generation)
            slot_memory.require_fit(segment, {name: size for name, size, _ in needed})
        except VaultError as error:
            raise Refused(Refusal.NO_SHARED_MEMORY, str(error)) from error
        slot = store.claim(segment, generation, offer.epoch)
        if slot is None:
            with self._gate.lock:
                is_old = store.table.superseded(segment, generation)
            raise Refused(Refusal.SUPERSEDED if is_old else Refusal.EARLY)
        try:
            try:
                slot_memory.reserve(store, segment, wanted, slot, generation)
            except VaultError as error:
                raise Refused(Refusal.NO_SHARED_MEMORY, str(error)) from error
            # A restore compares shards from peers with the owner's checksums. So these checksums
            # are noted before the extras are sealed, which make the generation count as held.
            store.note_elsewhere(segment, slot, offer.elsewhere, offer.epoch)
            self._channel.send({"t": "need", "parts": wanted})
            return [part[0] for part in needed if self._receive(segment, slot, *part, offer.epoch)]
        finally:
            store.release(segment, slot)

    def _receive(
        self, segment: Segment, slot: int, name: str, nbytes: int, digest: int, epoch: int
    ) -> bool:
        """Receive and seal a part; False if its bytes are damaged. Raises VaultError when the epoch
        is closed."""
        store, role = self._store, segment.layout.role
        store.open_part(segment, slot, name, epoch)
        found = transports.receive_part(self._channel, segment, slot, name, nbytes)
        if found != digest:
            generation = segment.generation(slot)
            store.reports.corruption(role, generation, name, "wire", digest, found)
            return False
        store.reports.counters["bytes received"] += nbytes
        store.seal_copy(segment, slot, name, nbytes, digest, epoch)
        store.fail_point_corrupt("vault.received", segment, slot, [name])
        return True

    def _offer(self, message: Mapping[str, Any]) -> Offer:
        """Return the parts that a message offers. Raises Refused for a sender, epoch, generation,
        layout or part that cannot be."""
        epoch, role = int(message["epoch"]), int(message["role"])
        generation = Generation.from_list(message["generation"])
        parts = {str(name): (int(size), int(digest)) for name, size, digest in message["parts"]}
        with self._gate.lock:
            self._require_open(epoch)
            record, layout = self._gate.record, self._layout
        if record is None or record.epoch != epoch:
            raise Refused(Refusal.EARLY)
        seat = record.seats.get(role)
        if seat is None or seat.node != int(message["node"]):
            raise Refused(Refusal.WRONG_SENDER)
        if not 0 <= generation.iteration < 1 << 63:
            raise Refused(Refusal.WRONG_ITERATION)
        if generation.lineage != epoch and generation != record.restore.generation:
            raise Refused(Refusal.WRONG_LINEAGE)
        if layout is None or layout.role != role or layout.layout_hash != message["layout_hash"]:
            raise Refused(Refusal.WRONG_LAYOUT)
        capacities = {part.name: part.nbytes for part in layout.parts}
        elsewhere = tuple(
            (str(name), int(size), int(digest))
            for name, size, digest in message.get("elsewhere", ())
        )
        sizes = [(name, size) for name, (size, _) in parts.items()]
        sizes += [(name, size) for name, size, _ in elsewhere]
        if any(not 0 <= size <= capacities.get(name, -1) for name, size in sizes):
            raise Refused(Refusal.WRONG_PART)
        return Offer(epoch, generation, layout, parts, elsewhere)

    def _require_open(self, epoch: int) -> None:
        if reason := self._gate.judge(epoch):
            raise Refused(reason)

    # Handing out.

    def _describe(self, message: Mapping[str, Any]) -> None:
        """Answer with the layout of a role and, for a generation, the checksums of its parts that
        peers hold. If ``again`` is in the message, it is a node that has lost parts of that
        generation; they are sent to this node again."""
        role, named, again = int(message["role"]), message.get("generation"), message.get("again")
        elsewhere = dict[str, tuple[int, int]]()
        with self._gate.lock:
            layout = self._store.table.layout(role)
            if named is not None:
                elsewhere = self._store.table.elsewhere(role, Generation.from_list(named))
        if named is not None and again is not None:
            self._ledger.forget(role, Generation.from_list(named), int(again))
        described = layout.to_dict() if layout else None
        others = [[name, *checked] for name, checked in elsewhere.items()]
        self._channel.send({"t": "layout", "layout": described, "elsewhere": others})

    def _fetch(self, message: Mapping[str, Any]) -> None:
        """Send a part that another vault requests. Raises Refused if it is not held."""
        epoch, role, name = int(message["epoch"]), int(message["role"]), str(message["part"])
        generation = Generation.from_list(message["generation"])
        self._require_open(epoch)
        failpoints.hit("vault.fetch", role=role, iteration=generation.iteration, part=name)
        table = self._store.table
        with self._gate.lock:
            places = table.find(role, generation, name)
            if not places:
                raise Refused(Refusal.NOT_HELD)
            table.pin(places[0])
        try:
            self._send(places[0], generation)
        finally:
            with self._gate.lock:
                table.unpin(places[0])

    def _send(self, place: Place, generation: Generation) -> None:
        """Send a part and check it on the way, so that a damaged slot is found on its node."""
        store, view, size = self._store, place.view, self._store.settings.chunk_bytes
        about = {"role": place.segment.layout.role, "iteration": generation.iteration}
        self._channel.send({"t": "part", "nbytes": place.nbytes, "checksum": place.checksum})
        digest = xxhash.xxh3_64()
        for start in range(0, len(view), size):
            piece = view[start : start + size]
            digest.update(piece)
            piece = failpoints.maybe_corrupted(piece, "vault.chunk", part=place.name, **about)
            self._channel.send_bulk(piece)
            store.reports.counters["bytes fetched from here"] += len(piece)
        if digest.intdigest() != place.checksum:
            store.mark_bad(place, digest.intdigest())
