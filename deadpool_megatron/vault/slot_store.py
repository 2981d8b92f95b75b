"""The slot store: the slots of a node, and all ways to seal parts in them.

A part can be restored as soon as it is sealed. The epoch gate permits seals in the open epoch only,
and each seal is entered in the commit ledger under the same lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from deadpool_megatron import failpoints
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import EpochRecord, Generation, Inventory
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.commit_ledger import CommitLedger
from deadpool_megatron.vault.copies import Scheme
from deadpool_megatron.vault.epoch_gate import EpochGate
from deadpool_megatron.vault.errors import Refusal, VaultError, VaultReports
from deadpool_megatron.vault.lanes import Lane, Lanes
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.shared_nic import Pace, SharedNic
from deadpool_megatron.vault.shm.segment import Filled, PartState, Segment, SlotState
from deadpool_megatron.vault.shm.table import Place, Table
from deadpool_megatron.vault.transport import Transport


class SlotStore:
    """Slots of one node, with the gate and the ledger that belong to them. Thread-safe: methods
    take the gate's lock, which guards ``table`` and the slots' headers.

    ``scheme_of`` makes the scheme of a record for this store.
    ``on_bad(epoch, role, generation, part)`` is called without the lock, and must not wait.
    """

    def __init__(
        self,
        scheme_of: Callable[[EpochRecord, SlotStore], Scheme],
        node: int,
        directory: Path,
        settings: Settings,
        emit: Callable[[Event], None],
        *transports: Transport,
    ) -> None:
        self.settings = settings
        self.reports = VaultReports(node, emit)
        self.table = Table(directory, Budget(directory, settings.memory_bytes))
        names = [transport.interface for transport in transports] or [""]
        self.nic = SharedNic(settings, names[0], lanes=len(names))
        more = [SharedNic(settings, n, lanes=len(names), first=self.nic) for n in names[1:]]
        lanes = Lanes([*map(Lane, transports, [self.nic, *more])], self.reports.warn)
        self.gate = EpochGate(node, lanes)
        self.ledger = CommitLedger(self.gate, self.table, self.nic, self.reports)
        self.on_bad: Callable[[int, int, Generation, str], None] = lambda *_: None
        self._scheme_of = scheme_of
        self._creation_locks: dict[int, threading.Lock] = {}

    # Epochs.

    def close(self, epoch: int) -> None:
        """Close ``epoch`` and all older epochs: no part of them is sealed on this node any more."""
        with self.gate.lock:
            if self.gate.close(epoch):
                self.reports.epoch = 0
                self.table.freeze()

    def inventory(self) -> Inventory:
        """Return the parts of this node. Raises VaultError unless the epoch has been closed."""
        gate = self.gate
        with gate.lock:
            if gate.open_epoch or not gate.closed_epoch:
                raise VaultError("an inventory is only stable after the epoch has been closed")
            layouts = tuple(layout.without_runs for layout in self.table.layouts())
            return Inventory(gate.node, gate.closed_epoch, self.table.holdings(), layouts)

    def adopt(self, record: EpochRecord) -> bool:
        """Drop the generations that the record abandons, and open its epoch; False when the epoch
        is open already.

        Raises VaultError for the record of a closed epoch.
        """
        gate, ledger, restore = self.gate, self.ledger, record.restore
        with gate.lock:
            if record.epoch == gate.open_epoch:
                return False
            if gate.judge(record.epoch) is Refusal.STALE:
                raise VaultError(f"epoch {record.epoch} is over on node {gate.node}")
            self.table.adopt(restore.generation, restore.boundary, record.epoch, record.seats)
            gate.record = record
            ledger.begin(self._scheme_of(record, self))
            self.nic.begin()
            gate.lanes.begin(record)
            for segment in list(self.table.segments.values()):
                is_needed = restore.generation in self.table.holds(segment)
                if not is_needed and not self.is_used(segment):
                    self.table.remove(segment)
            self.reports.epoch = record.epoch
            gate.open(record)
            for role in gate.own_roles():  # a role that owes no parts gets no acknowledgement
                if (layout := self.table.layout(role)) is not None:
                    ledger.advance(layout)
            return True

    # Segments.

    def attach(self, name: str) -> Segment:
        """Map an existing segment."""
        with self.gate.lock:
            segment = self.table.attach(name)
            if self.gate.open_epoch:
                self.table.let_write(segment)
            return segment

    def creation_lock(self, role: int) -> threading.Lock:
        """Return the lock under which segments of a role are created."""
        with self.gate.lock:
            return self._creation_locks.setdefault(role, threading.Lock())

    def is_used(self, segment: Segment) -> bool:
        """Return whether a segment is still written in the epoch of the record; under the lock."""
        record, scheme = self.gate.record, self.ledger.scheme
        if record is None or scheme is None:
            return False
        if segment.seat is not None:
            return record.seats.get(segment.layout.role) == segment.seat
        return bool(scheme.keeps(segment.layout, self.gate.node))

    # Sealing.

    def seal_own(
        self, segment: Segment, filled: Filled, digests: dict[str, int], epoch: int
    ) -> bool:
        """Seal check-summed parts of a member's slot; False when it is too late."""
        role, slot, generation = segment.layout.role, filled.slot, filled.generation
        with self.gate.lock:
            if not self.gate.is_open(epoch):  # the slot may belong to the next epoch by now
                return False
            if self.gate.own_roles().get(role) != segment.seat:
                self.reports.refuse("seal of a member without a seat", role=role, epoch=epoch)
                return False
            state = segment.state(slot)
            if state not in (SlotState.FILLED, SlotState.SEALED):
                return False
            if segment.generation(slot) != generation:
                return False
            for name, digest in digests.items():
                segment.seal_part(slot, name, segment.entry(slot, name).nbytes, digest, epoch)
            if failpoints.ACTIVE:
                self.fail_point_corrupt("vault.sealed", segment, slot, digests)
            if state is SlotState.FILLED:  # the member may reuse a SEALED slot at any time
                segment.set_state(slot, SlotState.SEALED)
                self.nic.note(Pace.sealed, role, generation)
            self.ledger.advance(segment.layout)
            facts = {"lineage": generation.lineage, "parts": sorted(digests)}
            self.reports.emit(Kind.SEALED, role, generation, facts)
        return True

    def open_part(self, segment: Segment, slot: int, name: str, epoch: int) -> None:
        """Invalidate a part of a claimed slot before its bytes arrive. Raises VaultError when the
        epoch is closed."""
        with self.gate.lock:
            self.gate.require_open(epoch)
            segment.invalidate_part(slot, name, PartState.ABSENT)

    def copy_part(self, place: Place, segment: Segment, slot: int, epoch: int) -> Place | int:
        """Copy a part into a claimed slot and seal it, or return the checksum of damaged bytes.

        Raises VaultError when the epoch is closed, since the member of the next epoch must not wait
        for this slot.
        """
        self.open_part(segment, slot, place.name, epoch)
        target = segment.data(slot, place.name, place.nbytes)
        keep_going = partial(self.gate.require_open, epoch)
        found = place.copy_into(target, self.settings.chunk_bytes, keep_going)
        if found != place.checksum:
            return found
        return self.seal_copy(segment, slot, place.name, place.nbytes, place.checksum, epoch)

    def seal_copy(
        self, segment: Segment, slot: int, name: str, nbytes: int, digest: int, epoch: int
    ) -> Place:
        """Seal a part whose last byte has arrived and whose checksum matched. Raises VaultError
        when the epoch is closed."""
        role = segment.layout.role
        with self.gate.lock:
            if not self.gate.is_open(epoch):
                self.reports.refuse(Refusal.STALE, role=role, epoch=epoch)
            self.gate.require_open(epoch)
            segment.seal_part(slot, name, nbytes, digest, epoch)
            self.ledger.advance(segment.layout)
        return Place(segment, slot, name, nbytes, digest, epoch)

    def note_elsewhere(
        self, segment: Segment, slot: int, parts: Iterable[tuple[str, int, int]], epoch: int
    ) -> None:
        """Keep the owner's checksums of the parts that the copy in ``slot`` lacks."""
        with self.gate.lock:
            for name, nbytes, digest in parts if self.gate.is_open(epoch) else ():
                if segment.entry(slot, name).state is PartState.ABSENT:
                    segment.seal_part(slot, name, nbytes, digest, epoch, PartState.ELSEWHERE)

    # Slots of copies.

    def claim(
        self, segment: Segment, generation: Generation, epoch: int, *, fresh: bool = False
    ) -> int | None:
        """See :meth:`Table.claim`; None also when the epoch is not open."""
        with self.gate.lock:
            if not self.gate.is_open(epoch):
                return None
            return self.table.claim(segment, generation, epoch, fresh=fresh)

    def release(self, segment: Segment, slot: int) -> None:
        """Release a slot that was claimed."""
        with self.gate.lock:
            self.table.release(segment, slot)

    # Damage.

    def mark_bad(self, place: Place, found: int) -> None:
        """Note that a checksum did not match the bytes in this node's memory."""
        role, generation = place.segment.layout.role, place.segment.generation(place.slot)
        with self.gate.changed:
            entry = place.segment.entry(place.slot, place.name)
            if (entry.state, entry.checksum) != (PartState.SEALED, place.checksum):
                return  # overwritten while it was read: the slot has another generation now
            if entry.epoch != place.epoch:
                return  # another thread has marked it, and the part was restored since
            self.table.mark_bad(place)
            self.gate.changed.notify_all()
        self.reports.corruption(
            role, generation, place.name, f"slot {place.segment.path.name}", place.checksum, found
        )
        # A damaged part of the restored generation is fetched again. That of a newer generation
        # blocks the gate: its member reports a fault, which leads to another epoch.
        if place.segment.seat is not None and generation.lineage == self.gate.open_epoch:
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
