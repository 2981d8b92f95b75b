"""Generations and parts that exist on this node, and slots that may be overwritten.

Not thread-safe: every call is made under the vault's lock. While frozen, the table answers from its
state at the moment of freezing. The inventory promises that state, and no member can change it, not
even a member that was stopped just before it wrote to a slot and resumes now.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from deadpool_megatron.layout import records
from deadpool_megatron.layout.records import BOUNDARIES, Generation, Holding, RoleLayout, Seat
from deadpool_megatron.vault.errors import DamagedSegment, SegmentError
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.shm import segment as segments
from deadpool_megatron.vault.shm.segment import PartEntry, PartState, Segment, SlotState, fence

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SealedSlot:
    """A slot with a valid generation, and its sealed parts."""

    segment: Segment
    slot: int
    generation: Generation
    parts: dict[str, PartEntry]


@dataclass(frozen=True)
class Place:
    """The place of a part's sealed bytes in this node's memory; ``epoch``: that of the seal."""

    segment: Segment
    slot: int
    name: str
    nbytes: int
    checksum: int
    epoch: int

    @staticmethod
    def of(segment: Segment, slot: int, name: str, entry: PartEntry) -> Place:
        """Return the place of a part with this header entry."""
        return Place(segment, slot, name, entry.nbytes, entry.checksum, entry.epoch)

    @property
    def key(self) -> tuple[str, int]:
        """Return the key of its pins and writers."""
        return self.segment.path.name, self.slot

    @property
    def view(self) -> memoryview:
        """Return the bytes."""
        return self.segment.data(self.slot, self.name, self.nbytes)

    def copy_into(
        self, target: memoryview, piece_bytes: int, keep_going: Callable[[], None]
    ) -> int:
        """Copy the bytes and return the checksum of the copy. Not under the vault's lock.

        The kernel copies (the interpreter lock is free meanwhile), and each piece is hashed while
        it is in the cache. ``keep_going`` is called before each piece, and raises to end the copy.
        """
        digest = xxhash.xxh3_64()
        for start in range(0, self.nbytes, piece_bytes):
            keep_going()
            piece = target[start : min(start + piece_bytes, self.nbytes)]
            self.segment.read_into(self.slot, self.name, start, piece)
            digest.update(piece)
        return digest.intdigest()


class Table:
    """All segments of one node's directory."""

    def __init__(self, directory: Path, budget: Budget | None = None) -> None:
        self.directory = directory
        self.budget = budget or Budget(directory)
        self.segments: dict[str, Segment] = {}
        self.pins: Counter[tuple[str, int]] = Counter()
        self.writers: set[tuple[str, int]] = set()
        self._promised: list[SealedSlot] | None = None
        self._seats: Mapping[int, Seat] = {}
        self._unread: list[str] = []  # the reasons why files were not read
        self.dropped: dict[str, DamagedSegment] = {}  # file name -> damage of a removed copy
        self.removed: list[Segment] = []  # their memory is still in use

    # Segments.

    def scan(self) -> int:
        """Map every whole segment file, remove unfinished files, and return the count of sealed
        slots.

        For a vault that has just started; members may be writing meanwhile. A segment of another
        version stays for that version: see :meth:`require_read`. A copy whose description is
        damaged cannot be read: it is removed and noted in ``dropped``.
        """
        for path in sorted(self.directory.iterdir()):
            # A link of Segment.keep_name() leads nowhere: the vault with the open file has ended.
            if path.is_symlink():
                path.unlink()
            elif path.suffix == ".seg" and not path.name.startswith("."):
                try:
                    self.attach(path.name)
                except SegmentError as error:
                    if (
                        isinstance(error, DamagedSegment)
                        and segments.parse_name(path.name)[1] is None
                    ):
                        log.error("%s: this copy is removed", error)
                        self.dropped[path.name] = error
                        path.unlink()
                    elif _is_torn(path):
                        path.unlink()
                    else:
                        self._unread.append(str(error))
            elif path.name.startswith((".copy-", ".own-")):
                path.unlink(missing_ok=True)
        for segment in self.segments.values():
            if segment.seat is None:
                _deduplicate_slots(segment)
        return sum(1 for _ in self.sealed())

    def require_read(self) -> None:
        """Raise SegmentError if segments could not be read by scan(): no vault may overwrite
        them."""
        if self._unread:
            raise SegmentError(f"{'; '.join(self._unread)}: kept, for the version that wrote it")

    def attach(self, name: str) -> Segment:
        """Return the mapped segment of that name. Raises SegmentError or OSError."""
        segment = self.segments.get(name)
        if segment is None:
            segment = self.segments[name] = Segment.open(self.directory / name, budget=self.budget)
            if self._promised is not None and segment.seat is not None:
                segment.freeze(True)
        return segment

    def own(self, role: int, seat: Seat) -> Segment | None:
        """Return the segment that the member on ``seat`` writes for ``role``, if it exists."""
        return self.segments.get(segments.own_name(role, seat))

    def layout(self, role: int) -> RoleLayout | None:
        """Return the layout of a role from a segment here, if possible from a segment with sealed
        parts: a process with another model may have left empty slots."""
        holding = (slot.segment.layout for slot in self.sealed(role) if slot.parts)
        others = (s.layout for s in self.segments.values() if s.layout.role == role)
        return next(itertools.chain(holding, others), None)

    def remove(self, segment: Segment) -> None:
        """Remove the file of a segment. All mappings stay readable; the memory is freed when
        ``removed`` is cleared, without the lock."""
        segment.path.unlink(missing_ok=True)
        self.removed.append(segment)
        del self.segments[segment.path.name]
        if self._promised is not None:
            self._promised = [s for s in self._promised if s.segment is not segment]

    # Contents of segments.

    def sealed(self, role: int | None = None) -> Iterator[SealedSlot]:
        """Yield every sealed slot, or those of a role. While frozen, the promised state counts."""
        if self._promised is not None:
            yield from (s for s in self._promised if role in (None, s.segment.layout.role))
            return
        for segment in self.segments.values():
            if role in (None, segment.layout.role):
                yield from _sealed_slots(segment)

    def find(self, role: int, generation: Generation, name: str) -> list[Place]:
        """Return all places of a part on this node, the members' own slots first."""
        found = [
            Place.of(slot.segment, slot.slot, name, entry)
            for slot in self.sealed(role)
            if slot.generation == generation and (entry := slot.parts.get(name)) is not None
        ]
        return sorted(found, key=lambda place: place.segment.seat is None)

    def held(self, role: int) -> dict[Generation, set[str]]:
        """Return the generations of a role with the names of the parts that are sealed here."""
        found: dict[Generation, set[str]] = {}
        for slot in self.sealed(role):
            if slot.parts:
                found.setdefault(slot.generation, set()).update(slot.parts)
        return found

    def elsewhere(self, role: int, generation: Generation) -> dict[str, tuple[int, int]]:
        """Return the parts of a role that other roles hold for it: name -> bytes and the checksum
        that the role's own vault has computed."""
        return {
            part.name: (entry.nbytes, entry.checksum)
            for slot in self.sealed(role)
            if slot.generation == generation
            for part in slot.segment.layout.parts
            if (entry := slot.segment.entry(slot.slot, part.name)).state is PartState.ELSEWHERE
        }

    def holdings(self) -> tuple[Holding, ...]:
        """Return all sealed parts, by role and generation."""
        roles = sorted({segment.layout.role for segment in self.segments.values()})
        return tuple(
            Holding(role, generation, frozenset(parts))
            for role in roles
            for generation, parts in sorted(self.held(role).items())
        )

    def layouts(self) -> tuple[RoleLayout, ...]:
        """Return a layout for each role with a segment here, if possible that of sealed parts."""
        found = {s.layout.role: s.layout for s in self.segments.values()}
        found |= {s.segment.layout.role: s.segment.layout for s in self.sealed() if s.parts}
        return tuple(found[role] for role in sorted(found))

    def remove_empty(self) -> None:
        """Remove segments without a sealed part; only while no process fills a segment."""
        holding = {slot.segment.path for slot in self.sealed() if slot.parts}
        for segment in [s for s in self.segments.values() if s.path not in holding]:
            self.remove(segment)

    # Closing and opening an epoch.

    def freeze(self) -> None:
        """Forbid members to write, and keep the present state as the promise. Idempotent."""
        if self._promised is not None:
            return
        for segment in self.segments.values():
            if segment.seat is not None:
                segment.freeze(True)
        fence()
        self._promised = list(self.sealed())

    def adopt(
        self, generation: Generation, boundary: str, epoch: int, seats: Mapping[int, Seat]
    ) -> None:
        """Begin epoch ``epoch`` from ``generation``: drop abandoned generations, then let the
        members named in ``seats`` (role -> seat) write again.

        Segments of members that have lost their seat stay frozen forever. A member that marks a
        promised slot as WRITING sees that its segment is frozen, and takes the mark back before it
        writes a byte. If it was killed in between, the slot is whole, and is marked SEALED here.
        """
        for sealed in self._promised or ():
            segment, slot = sealed.segment, sealed.slot
            intact = segment.generation(slot) == sealed.generation
            if segment.state(slot) is SlotState.WRITING and intact and segment.seat is not None:
                segment.set_state(slot, SlotState.SEALED)
        self._promised, self._seats = None, seats
        self._drop_after(generation, boundary, epoch)
        for segment in self.segments.values():
            self.let_write(segment)

    def let_write(self, segment: Segment) -> None:
        """Let the member of a segment write if it still has its seat, unless a thread of this vault
        restores into a slot of it, perhaps for a closed epoch."""
        is_claimed = any(name == segment.path.name for name, _ in self.writers)
        if segment.seat is not None and self._promised is None:
            has_seat = self._seats.get(segment.layout.role) == segment.seat
            segment.freeze(is_claimed or not has_seat)

    def _drop_after(self, generation: Generation, boundary: str, epoch: int) -> None:
        """Drop the remains of epochs before ``epoch``: unsealed parts, generations newer than
        ``generation``, and extras of ``generation`` that were captured after ``boundary``."""
        late = [records.extras_part(b) for b in BOUNDARIES[BOUNDARIES.index(boundary) + 1 :]]
        for segment in self.segments.values():
            for slot in range(segment.slots):
                state, found = segment.state(slot), segment.generation(slot)
                if state in (SlotState.FILLED, SlotState.SEALED):
                    unsealed = state is SlotState.FILLED and segment.epoch(slot) < epoch
                    if unsealed or (found > generation and found.lineage < epoch):
                        segment.set_state(slot, SlotState.EMPTY)
                    elif state is SlotState.SEALED:
                        _drop_parts(segment, slot, late if found == generation else [], epoch)

    def mark_bad(self, place: Place) -> None:
        """Exclude these bytes from use."""
        place.segment.invalidate_part(place.slot, place.name, PartState.BAD)
        for sealed in self._promised or ():
            if sealed.segment is place.segment and sealed.slot == place.slot:
                sealed.parts.pop(place.name, None)

    # Slots of copies.

    def claim(
        self, segment: Segment, generation: Generation, epoch: int, *, fresh: bool = False
    ) -> int | None:
        """Return the slot of a copy into which the caller alone may write a generation; None while
        no slot is free.

        The first choice is the slot that holds the generation already, the second a slot without
        sealed parts, the third the slot with the oldest generation. That must not be the newest
        here, nor be newer than the offered generation. The owner offers k+1 only after all roles
        have committed k, which gives rule 3 of docs/design.md.

        A copy has as many slots as its owner, and only the oldest generation is overwritten: a
        restore may need any other.

        ``fresh``: do not return the slot in which parts of the generation are sealed; that slot
        stays unchanged until :meth:`replace`.
        """
        name = segment.path.name
        free: list[tuple[Generation, int]] = []
        held = {s.slot: s.generation for s in _sealed_slots(segment) if s.parts}
        newest = max(held.values(), default=None)
        for slot in range(segment.slots):
            state, found = segment.state(slot), segment.generation(slot)
            taken = (name, slot) in self.writers
            if state is SlotState.SEALED and found == generation:
                if fresh and slot in held:
                    continue
                if taken:
                    return None
                self.writers.add((name, slot))
                return slot
            if taken or self.pins[name, slot]:
                continue
            if slot not in held:
                free.append((Generation(-1, -1), slot))
            elif found != newest and found < generation:
                free.append((found, slot))
        if not free:
            return None
        slot = min(free)[1]
        segment.open_slot(slot, generation, epoch)
        self.writers.add((name, slot))
        return slot

    def replace(self, segment: Segment, slot: int, seal: Callable[[], None]) -> None:
        """Have ``seal`` seal the parts of the claimed ``slot``, then drop the other slots of its
        generation. Even if this process is killed, a valid slot remains: see
        :func:`_deduplicate_slots`.
        """
        generation = segment.generation(slot)
        others = [
            sealed.slot
            for sealed in _sealed_slots(segment)
            if sealed.generation == generation and sealed.slot != slot
        ]
        for other in others:
            segment.set_state(other, SlotState.WRITING)
        seal()
        for other in others:
            segment.set_state(other, SlotState.EMPTY)

    def superseded(self, segment: Segment, generation: Generation) -> bool:
        """Return whether every slot of a copy holds a newer generation."""
        held = [s.generation for s in _sealed_slots(segment) if s.parts]
        return len(held) == segment.slots and min(held) > generation

    def release(self, segment: Segment, slot: int) -> None:
        """Release a slot that was claimed."""
        self.writers.discard((segment.path.name, slot))
        self.let_write(segment)

    def pin(self, place: Place) -> None:
        """Keep a slot from being given to another generation. Pins are counted."""
        self.pins[place.key] += 1

    def unpin(self, place: Place) -> None:
        """Release a :meth:`pin`."""
        self.pins[place.key] -= 1

    def holds(self, segment: Segment) -> set[Generation]:
        """Return the generations of which a segment holds parts."""
        return {
            slot.generation
            for slot in self.sealed(segment.layout.role)
            if slot.segment is segment and slot.parts
        }

    def unneeded(self, segment: Segment, successors: Callable[[Generation], int]) -> bool:
        """Return whether no restore can need an inactive segment any more.

        A member overwrites generation g after as many further generations as it has slots, because
        every role has committed a newer generation by then (docs/design.md, "Slots and the gate").
        So g is not needed here either as soon as so late a generation of any role is sealed here.
        ``successors(g)``: the minimum number of generations that were written after g
        (layout.records).
        """
        keys = [(segment.path.name, slot) for slot in range(segment.slots)]
        if any(self.pins[key] or key in self.writers for key in keys):
            return False
        held = self.holds(segment)
        # A segment without parts was just created for bytes that are about to arrive.
        slots = segment.layout.slots
        return bool(held) and all(successors(generation) >= slots for generation in held)


def _sealed_slots(segment: Segment) -> Iterator[SealedSlot]:
    for slot, generation, entries in segment.sealed_slots():
        sealed = {n: entry for n, entry in entries.items() if entry.state is PartState.SEALED}
        parts = {n: entry for n, entry in sealed.items() if entry.nbytes <= segment.capacity(n)}
        yield SealedSlot(segment, slot, generation, parts)


def _drop_parts(segment: Segment, slot: int, late: list[str], epoch: int) -> None:
    """Drop parts of an older epoch that were appended too late, or never sealed."""
    for name, entry in segment.entries(slot).items():
        unwanted = name in late or entry.state is PartState.FILLED
        if unwanted and entry.state is not PartState.ABSENT and entry.epoch < epoch:
            segment.invalidate_part(slot, name, PartState.ABSENT)


def _is_torn(path: Path) -> bool:
    """Return whether a file is unfinished: the magic is written last, and never zero."""
    with path.open("rb") as file:
        return not any(file.read(8))


def _deduplicate_slots(segment: Segment) -> None:
    """Repair a segment whose vault was killed in :meth:`Table.replace`: keep the new slot if it has
    all parts of the old slot.

    A slot of a copy loses all its sealed parts before it gets another generation, so a WRITING slot
    with sealed parts is unchanged.
    """
    for slot in range(segment.slots):
        if segment.state(slot) is not SlotState.WRITING:
            continue
        entries = segment.entries(slot)
        sealed = {name for name in entries if entries[name].state is PartState.SEALED}
        if not sealed:
            continue
        twins = [s for s in _sealed_slots(segment) if s.generation == segment.generation(slot)]
        if any(sealed <= set(twin.parts) for twin in twins):
            segment.set_state(slot, SlotState.EMPTY)
            continue
        for twin in twins:
            segment.set_state(twin.slot, SlotState.EMPTY)
        segment.set_state(slot, SlotState.SEALED)
