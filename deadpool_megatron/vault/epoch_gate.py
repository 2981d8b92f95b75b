"""The epoch gate, and the commit rule: what the threads of a vault share, under one lock.

Closing is atomic with respect to sealing because both happen under that lock: a seal checks the
epoch, writes the header and enters the ledger without letting go of it. The lock is never held over
a checksum, a socket call or the reservation of memory.

A generation of a role is committed at a boundary when its own slot has all shard parts and the
extras up to that boundary sealed, and every target that the scheme names has acknowledged what it
is owed: a buddy a copy, the holder of a parity block that the part is in the block, which is
sealed. Where a generation travels as a step (:mod:`.schemes.gradients`), the parts of the step
stand for the shard parts that they lead to: a buddy acknowledges them only if it holds what they
begin from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

from deadpool_megatron import failpoints
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import (
    BOUNDARIES,
    EpochRecord,
    Generation,
    Inventory,
    RoleLayout,
    Seat,
    extras_part,
)
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import Refusal, Refused, VaultError, VaultReports
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.pace import Pace, SharedLink
from deadpool_megatron.vault.schemes.scheme import Scheme, Target, scheme_of
from deadpool_megatron.vault.shm.segment import Filled, PartState, Segment, SlotState
from deadpool_megatron.vault.shm.table import Place, Table
from deadpool_megatron.vault.transport import Channel, Transport


class VaultState:
    """Shared by all threads. ``lock`` guards every field that changes; methods take it themselves.

    ``changed`` is notified whenever a wait of a worker may be over. ``on_committed(role,
    generation, boundary)`` and ``on_bad(epoch, role, generation, part)`` are called without waiting
    for anybody and tell the member. ``transport``: None where no vault runs, and files are dumped.
    """

    def __init__(
        self,
        node: int,
        directory: Path,
        settings: Settings,
        emit: Callable[[Event], None],
        transport: Transport | None = None,
        interface: str = "",
    ) -> None:
        self.node = node
        self.transport = transport
        self.settings = settings
        self.table = Table(directory, Budget(directory, settings.memory_bytes))
        self.link = SharedLink(settings, interface)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.record: EpochRecord | None = None
        self.ledger: Ledger | None = None
        # Roles whose members have shown that a replay gives the very bytes of an update.
        self.rehearsed: set[int] = set()
        # Roles whose members have come to the end of the run: nothing newer will be sealed.
        self.ended: set[int] = set()
        self.open_epoch = 0
        self.closed_epoch = 0
        self.reports = VaultReports(node, emit)
        self.committed: dict[int, tuple[Generation, str]] = {}
        self.on_committed: Callable[[int, Generation, str], None] = lambda *_: None
        self.on_bad: Callable[[int, int, Generation, str], None] = lambda *_: None
        self._unprotected: dict[int, float] = {}  # role -> monotonic time since when
        # Bytes shipped since the last commit, of roles of which a copy was missing.
        self._shipped: dict[int, int] = {}
        self._closed_at = 0.0
        self._making: dict[int, threading.Lock] = {}

    # The epoch gate.

    def judge(self, epoch: int) -> Refusal | None:
        """Returns None for the open epoch, EARLY for one whose record has not arrived here yet,
        STALE for one that is over."""
        with self.lock:
            if epoch == self.open_epoch:
                return None
            newest = max(self.open_epoch, self.closed_epoch)
            return Refusal.EARLY if epoch > newest else Refusal.STALE

    def scheme(self, epoch: int) -> Scheme:
        """The scheme of an open epoch. Raises Refused for any other one."""
        with self.lock:
            if not self.is_open(epoch) or self.ledger is None:
                raise Refused(Refusal.STALE)
            return self.ledger.scheme

    def is_open(self, epoch: int) -> bool:
        """True while things of this epoch may be sealed."""
        return self.open_epoch == epoch

    def require_open(self, epoch: int) -> None:
        """Raise VaultError when nothing of this epoch may be sealed any more."""
        if not self.is_open(epoch):
            raise VaultError(f"epoch {epoch} was closed")

    def pause(self, epoch: int, seconds: float) -> None:
        """Wait before something is tried again; a close of its epoch ends it."""
        with self.changed:
            self.changed.wait_for(lambda: not self.is_open(epoch), timeout=seconds)

    def close(self, epoch: int) -> None:
        """After this returns nothing of ``epoch`` (or older) is ever sealed on this node."""
        with self.changed:
            if epoch < self.open_epoch:
                return
            self.closed_epoch = max(self.closed_epoch, epoch)
            self.open_epoch = self.reports.epoch = 0
            self._closed_at = time.monotonic()
            self.table.freeze()
            self.changed.notify_all()

    def inventory(self) -> Inventory:
        """Return what this node can produce. Raises VaultError unless the epoch has been closed."""
        with self.lock:
            if self.open_epoch or not self.closed_epoch:
                raise VaultError("an inventory is only stable after the epoch has been closed")
            return Inventory(
                self.node, self.closed_epoch, self.table.holdings(), self.table.layouts()
            )

    def adopt(self, record: EpochRecord) -> bool:
        """Drop what the record abandons and open its epoch; False when it is open already.

        Raises VaultError for the record of a closed epoch.
        """
        with self.changed:
            if record.epoch == self.open_epoch:
                return False
            if self.judge(record.epoch) is Refusal.STALE:
                raise VaultError(f"epoch {record.epoch} is over on node {self.node}")
            restore = record.restore
            self.table.adopt(restore.generation, restore.boundary, record.epoch, record.seats)
            if self.ledger is not None:
                self.ledger.scheme.cut()
            self.record, self.ledger = record, Ledger(scheme_of(record, self.rehearsed))
            self.ended = set()
            self.committed = {}
            self.link.begin()
            for segment in list(self.table.segments.values()):
                if not self.table.serves(segment, restore.generation) and not self.is_used(segment):
                    self.table.remove(segment)
            since = self._closed_at or time.monotonic()
            restored = restore.kind in ("memory", "dump")
            self._unprotected = dict.fromkeys(self.own_roles(), since) if restored else {}
            self._shipped = {}
            self.open_epoch = self.reports.epoch = record.epoch
            for role in self.own_roles():  # a role that owes nobody a copy gets no other occasion
                if (layout := self.table.layout(role)) is not None:
                    self._advance(layout, self.table.held(role))
            self.changed.notify_all()
            return True

    def own_roles(self) -> dict[int, Seat]:
        """Roles seated on this node in the current record."""
        if self.record is None:
            return {}
        return {r: seat for r, seat in self.record.seats.items() if seat.node == self.node}

    def dial(self, node: int) -> Channel:
        """Connect to the vault of a node. Raises OSError, WireError, or VaultError for a node that
        is not live."""
        address = self.record.nodes.get(node) if self.record is not None else None
        if address is None or self.transport is None:
            raise VaultError("not a live node")
        return self.transport.connect(node, address.host, address.vault_port)

    # Segments.

    def attach(self, name: str) -> Segment:
        """Map a segment that is there."""
        with self.lock:
            segment = self.table.attach(name)
            if self.open_epoch:
                self.table.let_write(segment)
            return segment

    def makes(self, role: int) -> threading.Lock:
        """Held by the one thread that makes a segment of a role."""
        with self.lock:
            return self._making.setdefault(role, threading.Lock())

    def is_used(self, segment: Segment) -> bool:
        """True when a segment is still written in the epoch of the record; under the lock."""
        if self.record is None or self.ledger is None:
            return False
        if segment.seat is not None:
            return self.record.seats.get(segment.layout.role) == segment.seat
        return bool(self.ledger.scheme.keeps(segment.layout, self.node))

    # Sealing: every way for bytes to become restorable goes through one of these three.

    def seal_own(
        self, segment: Segment, filled: Filled, digests: dict[str, int], epoch: int
    ) -> bool:
        """Seal parts of a member's slot that were check-summed; False when too late."""
        role, slot, generation = segment.layout.role, filled.slot, filled.generation
        with self.changed:
            if not self.is_open(epoch):  # the slot may be that of the next epoch by now
                return False
            if self.own_roles().get(role) != segment.seat:
                self.reports.refuse("seal of a member without a seat", role=role, epoch=epoch)
                return False
            state = segment.state(slot)
            if state not in (SlotState.FILLED, SlotState.SEALED):
                return False
            if segment.generation(slot) != generation:
                return False
            self.scheme(epoch).sealing(segment, slot, digests)
            for name, digest in digests.items():
                segment.seal_part(slot, name, segment.entry(slot, name).nbytes, digest, epoch)
            if failpoints.ACTIVE:
                self.fail_point_corrupt("vault.sealed", segment, slot, digests)
            if state is SlotState.FILLED:  # a SEALED one may be taken by its member at any time
                segment.set_state(slot, SlotState.SEALED)
                self.link.note(Pace.sealed, role, generation)
            self._advance(segment.layout, self.table.held(role))
            facts = {"lineage": generation.lineage, "parts": sorted(digests)}
            self.reports.emit(Kind.SEALED, role, generation, facts)
        return True

    def open_part(self, segment: Segment, slot: int, name: str, epoch: int) -> None:
        """Invalidate a part of a claimed slot before its bytes arrive. Raises VaultError when too
        late."""
        with self.lock:
            self.require_open(epoch)
            segment.invalidate_part(slot, name, PartState.ABSENT)

    def copy_part(self, place: Place, segment: Segment, slot: int, epoch: int) -> Place | int:
        """Copy a part into a claimed slot and seal it; the wrong checksum of damaged bytes. Raises
        VaultError at a close: the member of the next epoch must not wait for the slot of this."""
        self.open_part(segment, slot, place.name, epoch)
        target, go_on = (
            segment.data(slot, place.name, place.nbytes),
            partial(self.require_open, epoch),
        )
        found = place.copy_into(target, self.settings.chunk_bytes, go_on)
        if found != place.checksum:
            return found
        return self.seal_copy(segment, slot, place.name, place.nbytes, place.checksum, epoch)

    def seal_copy(
        self, segment: Segment, slot: int, name: str, nbytes: int, digest: int, epoch: int
    ) -> Place:
        """Seal a part whose last byte has arrived and whose checksum matched. Raises VaultError
        when late."""
        role = segment.layout.role
        with self.changed:
            if not self.is_open(epoch):
                self.reports.refuse(Refusal.STALE, role=role, epoch=epoch)
            self.require_open(epoch)
            segment.seal_part(slot, name, nbytes, digest, epoch)
            self._advance(segment.layout, self.table.held(role))
        return Place(segment, slot, name, nbytes, digest, epoch)

    def claim(
        self, segment: Segment, generation: Generation, epoch: int, *, anew: bool = False
    ) -> int | None:
        """See :meth:`Table.claim`; None also when the epoch is not open."""
        with self.lock:
            if not self.is_open(epoch):
                return None
            return self.table.claim(segment, generation, epoch, anew=anew)

    def release(self, segment: Segment, slot: int) -> None:
        """End of :meth:`claim`."""
        with self.lock:
            self.table.release(segment, slot)

    def mark_bad(self, place: Place, found: int) -> None:
        """A checksum did not match the bytes in this node's memory."""
        role, generation = place.segment.layout.role, place.segment.generation(place.slot)
        with self.changed:
            entry = place.segment.entry(place.slot, place.name)
            if (entry.state, entry.checksum) != (PartState.SEALED, place.checksum):
                return  # overwritten while it was read; it is another generation's slot now
            if entry.epoch != place.epoch:
                return  # others have found that out, and the part was restored into the same slot
            self.table.mark_bad(place)
            self.changed.notify_all()
        self.reports.corruption(
            role, generation, place.name, f"slot {place.segment.path.name}", place.checksum, found
        )
        # Of an older generation the lost part is fetched again; a new one can only be recomputed.
        if place.segment.seat is not None and generation.lineage == self.open_epoch:
            self.on_bad(generation.lineage, role, generation, place.name)

    def fail_point_corrupt(
        self, point: str, segment: Segment, slot: int, names: Collection[str]
    ) -> None:
        """Let a test damage one byte of a slot at an exact moment."""
        role, generation = segment.layout.role, segment.generation(slot)
        if failpoints.hit(point, role=role, iteration=generation.iteration) is None:
            return
        view = next(v for name in names if len(v := segment.data(slot, name)))
        view[0] ^= 0xFF

    # Commit.

    def _tracked(self, held: Iterable[Generation]) -> list[Generation]:
        """Those of the generations of a role that are shipped in this epoch, oldest first."""
        if self.record is None:
            return []
        restored = self.record.restore.generation
        return sorted(g for g in held if g == restored or g.lineage == self.open_epoch)

    def shipment(
        self, layout: RoleLayout, target: Target, epoch: int
    ) -> tuple[Generation, list[Place]] | None:
        """The oldest generation of which a target is owed parts that it has not acknowledged."""
        with self.lock:
            if not self.is_open(epoch) or self.ledger is None:
                return None
            held = self.table.held(layout.role)
            for generation in self._tracked(held):
                missing = self.ledger.missing(layout, generation, held[generation], target)
                # Its member may have begun to overwrite the slot since: what a vault that was
                # restarted has yet to learn to be committed is free to be overwritten.
                found = (self.table.find(layout.role, generation, name) for name in missing)
                if places := [there[0] for there in found if there]:
                    return generation, places
            return None

    def elsewhere(self, layout: RoleLayout, generation: Generation) -> list[tuple[str, int, int]]:
        """Name, bytes and checksum of the own parts that are not shipped, as peers hold them."""
        with self.lock:
            names = () if self.ledger is None else self.ledger.scheme.elsewhere(layout)
            found = (self.table.find(layout.role, generation, name) for name in names)
            return [(there[0].name, there[0].nbytes, there[0].checksum) for there in found if there]

    def note_elsewhere(
        self, segment: Segment, slot: int, parts: Iterable[tuple[str, int, int]], epoch: int
    ) -> None:
        """Keep what the owner of a copy vouches for of parts that are not in it."""
        with self.lock:
            for name, nbytes, digest in parts if self.is_open(epoch) else ():
                if segment.entry(slot, name).state is PartState.ABSENT:
                    segment.seal_part(slot, name, nbytes, digest, epoch, PartState.ELSEWHERE)

    def shipped(self, role: int, nbytes: int, epoch: int) -> None:
        """So many bytes of a role have been sent to protect it."""
        with self.lock:
            if self.is_open(epoch):
                self._shipped[role] = self._shipped.get(role, 0) + nbytes

    def acknowledge(
        self,
        layout: RoleLayout,
        generation: Generation,
        node: int,
        names: list[str],
        epoch: int,
    ) -> None:
        """A buddy has these parts, or they are in a sealed parity block."""
        with self.changed:
            if self.is_open(epoch) and self.ledger is not None:
                self.ledger.acknowledge(layout.role, generation, node, names)
                self._advance(layout, self.table.held(layout.role))

    def forget(self, role: int, generation: Generation, node: int) -> None:
        """A node asks for what it has acknowledged of a generation: it is sent once more."""
        with self.changed:
            if self.ledger is not None:
                self.ledger.forget(role, generation, node)
                self.changed.notify_all()

    def _advance(self, layout: RoleLayout, held: Mapping[Generation, Collection[str]]) -> None:
        """Report what has become committed of a role, of which this node has ``held``; called under
        the lock, when that has changed or an acknowledgement has come."""
        role, ledger = layout.role, self.ledger
        tracked = self._tracked(held) if ledger is not None and role in self.own_roles() else []
        if tracked and ledger is not None:
            ledger.forget_before(role, tracked[0])
        for generation in tracked:
            assert ledger is not None
            boundary = ledger.boundary(layout, generation, held[generation])
            if boundary is None or (generation, boundary) == self.committed.get(role):
                continue
            if role in self.committed and generation < self.committed[role][0]:
                continue
            self.committed[role] = generation, boundary
            released = ledger.released(layout, generation)
            self._report_commit(role, generation, boundary, released)
        self.changed.notify_all()

    def _report_commit(
        self, role: int, generation: Generation, boundary: str, released: bool
    ) -> None:
        self.on_committed(role, generation, boundary)
        shipped_bytes = self._shipped.pop(role, 0)
        facts: dict[str, object] = {
            "lineage": generation.lineage,
            "boundary": boundary,
            "released": released,
        }
        facts |= {"bytes": shipped_bytes, **self.link.note(Pace.committed, role, generation)}
        self.reports.emit(Kind.COMMITTED, role, generation, facts)
        if released or role not in self._unprotected:
            return
        seconds = time.monotonic() - self._unprotected.pop(role)
        if shipped_bytes:
            self.reports.emit(Kind.EXPOSED, role, generation, {"seconds": seconds})


class Ledger:
    """Acknowledged parts of one epoch. Not thread-safe: the vault's lock guards it."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._acknowledged: dict[tuple[int, Generation, int], set[str]] = {}

    def released(self, layout: RoleLayout, generation: Generation) -> bool:
        """True when the record lets this role pass with fewer copies and it has to."""
        fewer = self.scheme.record.fewer_copies
        return layout.role in fewer and self.scheme.owed(layout, generation).is_short

    def acknowledge(
        self, role: int, generation: Generation, node: int, names: Iterable[str]
    ) -> None:
        """A node has sealed these parts, or the parity blocks they are in."""
        self._acknowledged.setdefault((role, generation, node), set()).update(names)

    def forget(self, role: int, generation: Generation, node: int) -> None:
        """A node has lost what it had acknowledged of a generation."""
        self._acknowledged.pop((role, generation, node), None)

    def forget_before(self, role: int, oldest: Generation) -> None:
        """No slot holds anything older any more: nothing of it can be asked for."""
        for key in [k for k in self._acknowledged if k[0] == role and k[1] < oldest]:
            del self._acknowledged[key]

    def missing(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str], target: Target
    ) -> list[str]:
        """Sealed parts that a target is owed and has not acknowledged, in layout order."""
        owed = self.scheme.owed(layout, generation).names.get(target, frozenset())
        done = self._acknowledged.get((layout.role, generation, target.node), set())
        left = (owed & {*sealed}) - done
        return [part.name for part in layout.parts if part.name in left]

    def boundary(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str]
    ) -> str | None:
        """The last boundary at which the generation is committed, or None."""
        owed = self.scheme.owed(layout, generation)
        if owed.is_short and layout.role not in self.scheme.record.fewer_copies:
            return None
        lacking = set[str]()
        for target, names in owed.names.items():
            lacking |= names - self._acknowledged.get((layout.role, generation, target.node), set())
        if not owed.here <= {*sealed} - lacking:
            return None
        reached = None
        for boundary in BOUNDARIES:
            name = extras_part(boundary)
            if name in sealed:
                if name in lacking:
                    break
                reached = boundary
        return reached
