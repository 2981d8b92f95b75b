"""State that the threads of a vault share: the epoch gate, the table, the ledger, reports.

Closing is atomic with respect to sealing because both happen under one lock: a seal checks the
epoch, writes the header and enters the ledger without letting go of it. The lock is never held over
a checksum, a socket call or the reservation of memory.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    Inventory,
    NodeAddress,
    RoleLayout,
    Seat,
    successors_by,
)
from deadpool_megatron.layout.replaying import generations_kept, keeps_steps
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core.commit import Ledger
from deadpool_megatron.vault.errors import Refusal, Refused, VaultError
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.pace import Link, Pace
from deadpool_megatron.vault.schemes.base import Scheme, Target, scheme_of
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, copy_name, steps_name
from deadpool_megatron.vault.shm.table import Place, Table

log = logging.getLogger(__name__)
# Strangers must not be able to flood the event log: one event a second for each reason.
_REFUSAL_EVENT_SECONDS = 1.0
_MOST_REASONS = 200
_NUMBERS = re.compile(r"\d+")  # reasons that differ in nothing else are counted as one


class VaultState:
    """Shared by all threads. ``lock`` guards every field that changes; methods take it themselves.

    ``changed`` is notified whenever a wait of a worker may be over. ``on_committed(role,
    generation, boundary, released)`` and ``on_bad(epoch, role, generation, part)`` are called
    without waiting for anybody and tell the member.
    """

    def __init__(
        self,
        node: int,
        directory: Path,
        settings: Settings,
        emit: Callable[[Event], None],
        interface: str = "",
    ) -> None:
        self.node = node
        self.settings = settings
        self.table = Table(directory, Budget(directory, settings.memory_bytes))
        self.link = Link(settings, interface)
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
        self.reports = Reports(node, emit, lambda: self.open_epoch)
        self.committed: dict[int, tuple[Generation, str]] = {}
        self.on_committed: Callable[[int, Generation, str, bool], None] = lambda *_: None
        self.on_bad: Callable[[int, int, Generation, str], None] = lambda *_: None
        self._unprotected: dict[int, float] = {}  # role -> monotonic time since when
        # Bytes shipped since the last commit, of roles of which a copy was missing.
        self._shipped: dict[int, int] = {}
        self._closed_at = 0.0
        self._newest = Generation(0, 0)
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

    def close(self, epoch: int) -> None:
        """After this returns nothing of ``epoch`` (or older) is ever sealed on this node."""
        with self.changed:
            if epoch < self.open_epoch:
                return
            self.closed_epoch = max(self.closed_epoch, epoch)
            self.open_epoch = 0
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
            self._newest = restore.generation
            self.link.begin()
            self._remove_unneeded_at_adopt(record)
            since = self._closed_at or time.monotonic()
            restored = restore.kind in ("memory", "dump")
            self._unprotected = dict.fromkeys(self.own_roles(), since) if restored else {}
            self._shipped = {}
            self.open_epoch = record.epoch
            for role in self.own_roles():  # a role that owes nobody a copy gets no other occasion
                self._advance(role)
            self.changed.notify_all()
            return True

    def own_roles(self) -> dict[int, Seat]:
        """Roles seated on this node in the current record."""
        if self.record is None:
            return {}
        return {r: seat for r, seat in self.record.seats.items() if seat.node == self.node}

    def address(self, node: int) -> NodeAddress | None:
        """Return where the vault of a live node listens."""
        return self.record.nodes.get(node) if self.record is not None else None

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

    def ensure_copy(self, layout: RoleLayout) -> Segment:
        """The segment for copies of a role; slots get their memory when they are first used.

        Raises VaultError when there is no room or the layouts differ.
        """
        return self._ensure(layout, copy_name(layout.role), layout.slots)

    def ensure_steps(self, layout: RoleLayout) -> Segment:
        """The segment for steps that lead on from these copies. Raises VaultError like that."""
        slots = generations_kept(layout, self.settings.full_every)
        return self._ensure(layout, steps_name(layout.role), slots)

    def _ensure(self, layout: RoleLayout, name: str, slots: int) -> Segment:
        with self.makes(layout.role):
            with self.lock:
                segment = self.table.segments.get(name)
            if segment is None:
                path = self.table.directory / name
                segment = Segment.create(path, layout, None, (), slots, self.table.budget)
                with self.lock:
                    self.table.segments[path.name] = segment
            else:
                self._check_same(segment, layout, slots)
            return segment

    def _check_same(self, segment: Segment, layout: RoleLayout, slots: int) -> None:
        """Raise VaultError unless a segment for copies of a role is one for this layout."""
        held = segment.layout
        if held.layout_hash != layout.layout_hash:
            raise VaultError(
                f"layout {layout.layout_hash} of role {layout.role} is not the"
                f" {held.layout_hash} that node {self.node} holds"
            )
        if keeps_steps(layout) and segment.slots != slots:
            raise VaultError(
                f"{segment.path.name} on node {self.node} has {segment.slots} slots, not {slots}:"
                " go on with the --deadpool-max-lag and --deadpool-set full-every that the run"
                " began with"
            )

    # Sealing: every way for bytes to become restorable goes through one of these three.

    def seal_own(
        self,
        segment: Segment,
        slot: int,
        generation: Generation,
        epoch: int,
        digests: dict[str, int],
    ) -> bool:
        """Seal the FILLED parts of a member's slot that were check-summed; False when too late."""
        role = segment.layout.role
        with self.changed:
            seat = self.own_roles().get(role)
            if not self.is_open(epoch) or seat != segment.seat:
                self.reports.refuse("seal of a closed epoch", role=role, epoch=epoch)
                return False
            state = segment.state(slot)
            if state not in (SlotState.FILLED, SlotState.SEALED):
                return False
            if segment.generation(slot) != generation:
                return False
            self.scheme(epoch).sealing(segment, slot, digests)
            for name, digest in digests.items():
                entry = segment.entry(slot, name)
                segment.seal_part(slot, name, entry.nbytes, digest, epoch)
            self.fail_point_corrupt("vault.sealed", segment, slot, digests)
            if state is SlotState.FILLED:  # a SEALED one may be taken by its member at any time
                segment.set_state(slot, SlotState.SEALED)
                self.link.note(Pace.sealed, role, generation)
            self._after_seal(role, generation)
            facts = {"lineage": generation.lineage, "parts": sorted(digests)}
            self.reports.emit(Kind.SEALED, role, generation, facts)
        return True

    def open_part(self, segment: Segment, slot: int, name: str, epoch: int) -> bool:
        """Invalidate a part of a claimed slot before its bytes arrive; False when too late."""
        with self.lock:
            if not self.is_open(epoch):
                return False
            segment.invalidate_part(slot, name, PartState.ABSENT)
            return True

    def seal_copy(
        self, segment: Segment, slot: int, name: str, nbytes: int, digest: int, epoch: int
    ) -> bool:
        """Seal a part whose last byte has arrived and whose checksum matched; False when late."""
        with self.changed:
            if not self.is_open(epoch):
                return False
            segment.seal_part(slot, name, nbytes, digest, epoch)
            self._after_seal(segment.layout.role, segment.generation(slot))
        return True

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
        self.reports.counters["corruption"] += 1
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
        if not failpoints.ACTIVE:
            return
        role, generation = segment.layout.role, segment.generation(slot)
        if failpoints.hit(point, role=role, iteration=generation.iteration) is None:
            return
        view = next(v for name in names if len(v := segment.data(slot, name)))
        view[0] ^= 0xFF

    # Commit.

    def tracked(self, role: int) -> list[Generation]:
        """Generations of a role that are shipped in this epoch, oldest first."""
        if self.record is None:
            return []
        restored = self.record.restore.generation
        found = {slot.generation for slot in self.table.sealed(role) if slot.parts}
        return sorted(g for g in found if g == restored or g.lineage == self.open_epoch)

    def shipment(
        self, layout: RoleLayout, target: Target, epoch: int
    ) -> tuple[Generation, list[Place]] | None:
        """The oldest generation of which a target is owed parts that it has not acknowledged."""
        with self.lock:
            if not self.is_open(epoch) or self.ledger is None:
                return None
            for generation in self.tracked(layout.role):
                sealed = self.table.parts(layout.role, generation)
                missing = self.ledger.missing(layout, generation, sealed, target)
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
                    segment.note_part(slot, name, nbytes, digest, epoch)

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
                self._advance(layout.role)

    def forget(self, role: int, generation: Generation, node: int) -> None:
        """A node asks for what it has acknowledged of a generation: it is sent once more."""
        with self.changed:
            if self.ledger is not None:
                self.ledger.forget(role, generation, node)
                self.changed.notify_all()

    def _after_seal(self, role: int, generation: Generation) -> None:
        self._newest = max(self._newest, generation)
        self._advance(role)
        self._remove_unneeded()
        self.changed.notify_all()

    def _advance(self, role: int) -> None:
        """Report what has become committed; called under the lock."""
        layout = self.table.layout(role)
        if layout is None or self.ledger is None or role not in self.own_roles():
            return
        tracked = self.tracked(role)
        if tracked:
            self.ledger.forget_before(role, tracked[0])
        for generation in tracked:
            sealed = self.table.parts(role, generation)
            boundary = self.ledger.boundary(layout, generation, sealed)
            if boundary is None or (generation, boundary) == self.committed.get(role):
                continue
            if role in self.committed and generation < self.committed[role][0]:
                continue
            self.committed[role] = generation, boundary
            released = self.ledger.released(layout, generation)
            self._report_commit(role, generation, boundary, released)
        self.changed.notify_all()

    def _report_commit(
        self, role: int, generation: Generation, boundary: str, released: bool
    ) -> None:
        self.on_committed(role, generation, boundary, released)
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

    # Memory that is not needed any more.

    def _active(self, segment: Segment, record: EpochRecord) -> bool:
        """True when the segment is still written in this epoch."""
        role = segment.layout.role
        if segment.seat is not None:
            return record.seats.get(role) == segment.seat
        return bool(self.ledger and self.ledger.scheme.keeps(segment.layout, self.node))

    def _remove_unneeded_at_adopt(self, record: EpochRecord) -> None:
        kept = record.restore.generation
        for segment in list(self.table.segments.values()):
            if not self.table.serves(segment, kept) and not self._active(segment, record):
                self.table.remove(segment)

    def _remove_unneeded(self) -> None:
        if self.record is None:
            return
        later = successors_by(self.record, self._newest)
        for segment in list(self.table.segments.values()):
            kept = generations_kept(segment.layout, self.settings.full_every)
            if not self._active(segment, self.record) and self.table.unneeded(segment, later, kept):
                self.table.remove(segment)


class Reports:
    """Thread-safe. Its lock is a leaf: nothing else is locked while it is held.

    ``send`` takes events without waiting for anybody; ``epoch`` answers which one is open.
    """

    def __init__(self, node: int, send: Callable[[Event], None], epoch: Callable[[], int]) -> None:
        self.counters: Counter[str] = Counter()
        self._node = node
        self.send = send
        self._epoch = epoch
        self._lock = threading.Lock()
        self._refused: dict[str, float] = {}  # reason -> monotonic time of its newest event

    def emit(self, kind: Kind, role: int, generation: Generation, data: dict[str, Any]) -> None:
        """Send an event about a generation of a role."""
        self.send(
            Event(
                kind,
                epoch=self._epoch(),
                node=self._node,
                role=role,
                iteration=generation.iteration,
                data=data,
            )
        )

    def corruption(
        self, role: int, generation: Generation, name: str, where: str, expected: int, found: int
    ) -> None:
        """Report bytes that are not what they should be."""
        log.warning("corruption: role %d %s part %s in %s", role, generation, name, where)
        checksums = {"expected": f"{expected:016x}", "found": f"{found:016x}"}
        data = {"part": name, "where": where, **checksums}
        self.emit(Kind.CORRUPTION, role, generation, data)

    def refuse(self, why: str, **facts: object) -> None:
        """Count something that was not accepted, and report it at most once a second."""
        now, reason = time.monotonic(), _NUMBERS.sub("N", why)
        with self._lock:
            if reason not in self._refused and len(self._refused) >= _MOST_REASONS:
                reason = "another reason"
            self.counters[f"refused: {reason}"] += 1
            if now - self._refused.get(reason, -1e9) < _REFUSAL_EVENT_SECONDS:
                return
            self._refused[reason] = now
        log.warning("refused: %s %s", why, facts)
        data = {"why": why, **{key: str(value) for key, value in facts.items()}}
        self.send(Event(Kind.REFUSED, epoch=self._epoch(), node=self._node, data=data))
