"""Generations and parts that exist on this node, and slots that may be overwritten.

Not thread-safe: every call is made under the vault's lock. While frozen, the table answers from
what it saw at the moment of freezing: that is the promise of the inventory, and not even a member
that was stopped just before a store and wakes up now can change it.
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
    """A slot whose generation words hold, with its sealed parts."""

    segment: Segment
    slot: int
    generation: Generation
    parts: dict[str, PartEntry]


@dataclass(frozen=True)
class Place:
    """Sealed bytes of one part in this node's memory; ``epoch``: in which they were sealed."""

    segment: Segment
    slot: int
    name: str
    nbytes: int
    checksum: int
    epoch: int

    @property
    def key(self) -> tuple[str, int]:
        """Return what pins and writers are counted by."""
        return self.segment.path.name, self.slot

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.segment.data(self.slot, self.name, self.nbytes)

    def copy_into(self, target: memoryview, piece_bytes: int, go_on: Callable[[], None]) -> int:
        """Copy the bytes; returns the checksum of what has arrived. Not under the vault's lock.

        The kernel copies (the interpreter lock is free meanwhile), and each piece is hashed while
        it is in the cache. ``go_on`` is called before each piece, and raises to end the copy.
        """
        digest = xxhash.xxh3_64()
        for start in range(0, self.nbytes, piece_bytes):
            go_on()
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
        self._unread: list[str] = []
        self.dropped: dict[str, DamagedSegment] = {}
        self.removed: list[Segment] = []

    # Which segments there are.

    def scan(self) -> int:
        """Map every whole segment file and remove pieces of unfinished ones; answers sealed slots.

        For a vault that was just (re)started; members may be writing meanwhile. A segment that is
        not understood stays, for the version that wrote it: see :meth:`require_read`. A copy whose
        description is damaged is removed and noted in ``dropped``: it cannot be read.
        """
        for path in sorted(self.directory.iterdir()):
            if path.is_symlink():  # see Segment.keep_name: what it led to went with its vault
                path.unlink()
            elif path.suffix == ".seg" and not path.name.startswith("."):
                try:
                    self.attach(path.name)
                except SegmentError as error:
                    if (
                        isinstance(error, DamagedSegment)
                        and segments.parse_name(path.name)[1] is None
                    ):
                        log.error("%s: this copy goes", error)
                        self.dropped[path.name] = error
                        path.unlink()
                    elif _is_torn(path):
                        path.unlink()
                    else:
                        self._unread.append(str(error))
            elif path.name.startswith((".copy-", ".own-", ".steps-")):
                path.unlink(missing_ok=True)
        for segment in self.segments.values():
            if segment.seat is None:
                _settle_twins(segment)
        return sum(1 for _ in self.sealed())

    def require_read(self) -> None:
        """Raise SegmentError for segments that could not be read: they are never overwritten."""
        if self._unread:
            raise SegmentError(f"{'; '.join(self._unread)}: kept, for the version that wrote it")

    def attach(self, name: str) -> Segment:
        """The mapped segment of that name. Raises SegmentError or OSError."""
        segment = self.segments.get(name)
        if segment is None:
            segment = self.segments[name] = Segment.open(self.directory / name, budget=self.budget)
            if self._promised is not None and segment.seat is not None:
                segment.freeze(True)
        return segment

    def own(self, role: int, seat: Seat) -> Segment | None:
        """The segment that the member on ``seat`` writes for ``role``, when it exists."""
        return self.segments.get(segments.own_name(role, seat))

    def layout(self, role: int) -> RoleLayout | None:
        """Return the layout of a role from a segment here, if possible from a segment with sealed
        parts: a process with another model may have left empty slots."""
        holding = (slot.segment.layout for slot in self.sealed(role) if slot.parts)
        others = (s.layout for s in self.segments.values() if s.layout.role == role)
        return next(itertools.chain(holding, others), None)

    def remove(self, segment: Segment) -> None:
        """Take the file of a segment away; mappings, ours and others', stay readable, and its
        memory goes when ``removed`` is cleared, unlocked."""
        segment.path.unlink(missing_ok=True)
        self.removed.append(segment)
        del self.segments[segment.path.name]
        if self._promised is not None:
            self._promised = [s for s in self._promised if s.segment is not segment]

    # Their contents.

    def sealed(self, role: int | None = None) -> Iterator[SealedSlot]:
        """Every sealed slot (of one role), as promised while frozen, else as it stands."""
        if self._promised is not None:
            yield from (s for s in self._promised if role in (None, s.segment.layout.role))
            return
        for segment in self.segments.values():
            if role in (None, segment.layout.role):
                yield from _sealed_slots(segment)

    def find(self, role: int, generation: Generation, name: str) -> list[Place]:
        """All places of one part on this node, the members' own slots first."""
        found = [
            Place(slot.segment, slot.slot, name, entry.nbytes, entry.checksum, entry.epoch)
            for slot in self.sealed(role)
            if slot.generation == generation and (entry := slot.parts.get(name)) is not None
        ]
        return sorted(found, key=lambda place: place.segment.seat is None)

    def held(self, role: int) -> dict[Generation, set[str]]:
        """Generations of a role with the names of their parts that are sealed on this node."""
        found: dict[Generation, set[str]] = {}
        for slot in self.sealed(role):
            if slot.parts:
                found.setdefault(slot.generation, set()).update(slot.parts)
        return found

    def elsewhere(self, role: int, generation: Generation) -> dict[str, tuple[int, int]]:
        """Bytes and checksum, as the role had them, of the parts that other roles hold for it."""
        return {
            part.name: (entry.nbytes, entry.checksum)
            for slot in self.sealed(role)
            if slot.generation == generation
            for part in slot.segment.layout.parts
            if (entry := slot.segment.entry(slot.slot, part.name)).state is PartState.ELSEWHERE
        }

    def holdings(self) -> tuple[Holding, ...]:
        """Everything sealed, one entry for each role and generation."""
        roles = sorted({segment.layout.role for segment in self.segments.values()})
        return tuple(
            Holding(role, generation, frozenset(parts))
            for role in roles
            for generation, parts in sorted(self.held(role).items())
        )

    def layouts(self) -> tuple[RoleLayout, ...]:
        """Return a layout for each role with a segment here, from one with sealed parts if any."""
        found = {s.layout.role: s.layout for s in self.segments.values()}
        found |= {s.segment.layout.role: s.segment.layout for s in self.sealed() if s.parts}
        return tuple(found[role] for role in sorted(found))

    def remove_empty(self) -> None:
        """Take away segments without a sealed part; only while no process fills one."""
        holding = {slot.segment.path for slot in self.sealed() if slot.parts}
        for segment in [s for s in self.segments.values() if s.path not in holding]:
            self.remove(segment)

    # Closing and opening an epoch.

    def freeze(self) -> None:
        """Forbid members to write and fix what is promised. Idempotent."""
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
        """Begin epoch ``epoch`` from ``generation``: drop what was abandoned, then let members
        named in ``seats`` (role -> seat) write again.

        Segments of members that have lost their seat stay frozen for ever. A promised slot whose
        member was killed between WRITING and backing out is whole and gets its state back.
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
        """Let the member write if it has its seat, unless a thread of this vault, perhaps of a
        closed epoch, still restores into a slot."""
        is_claimed = any(name == segment.path.name for name, _ in self.writers)
        if segment.seat is not None and self._promised is None:
            has_seat = self._seats.get(segment.layout.role) == segment.seat
            segment.freeze(is_claimed or not has_seat)

    def _drop_after(self, generation: Generation, boundary: str, epoch: int) -> None:
        """Forget everything newer than ``generation`` which was not computed in ``epoch`` itself,
        its extras captured after ``boundary`` and not in ``epoch``, and what was never sealed."""
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
        """Never hand out these bytes again."""
        place.segment.invalidate_part(place.slot, place.name, PartState.BAD)
        for sealed in self._promised or ():
            if sealed.segment is place.segment and sealed.slot == place.slot:
                sealed.parts.pop(place.name, None)

    # Slots of copies.

    def claim(
        self, segment: Segment, generation: Generation, epoch: int, *, fresh: bool = False
    ) -> int | None:
        """Return a slot of a copy for one writer at a time, or None while none is free.

        The slot that holds the generation already; else one without sealed parts; else the oldest,
        never the newest, nor any newer than the offered generation. That the owner offers k+1 only
        after k was committed by all roles makes this rule 3 (design section 4).

        So of whole copies, of which there are as many as the owner has slots, all but the oldest
        one stay: what may still be asked for is one of them, or computed from one. Of steps there
        are as many slots as can be between that and the newest one (layout.gradient_chain).

        ``fresh``: not the slot in which parts of the generation are sealed, which stays as it is
        until :meth:`replace`.
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
        """Have ``seal`` seal the parts of ``slot``, which was claimed again, and forget the other
        slots of the same generation. At every moment, a kill of this process included, one of them
        counts: see :func:`_settle_twins`.
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
        """True when every slot of a copy holds something newer than ``generation``."""
        held = [s.generation for s in _sealed_slots(segment) if s.parts]
        return len(held) == segment.slots and min(held) > generation

    def release(self, segment: Segment, slot: int) -> None:
        """End of :meth:`claim`."""
        self.writers.discard((segment.path.name, slot))
        self.let_write(segment)

    def pin(self, place: Place) -> None:
        """Keep a slot from being given to another generation; counted."""
        self.pins[place.key] += 1

    def unpin(self, place: Place) -> None:
        """End of one :meth:`pin`."""
        self.pins[place.key] -= 1

    def serves(self, segment: Segment, generation: Generation) -> bool:
        """True when a segment holds something of the generation that an epoch begins with, or may
        hold what that is computed from: the base of a chain may lie elsewhere than its end."""
        held = self.holds(segment)
        return generation in held or (bool(held) and bool(segment.layout.step_parts))

    def holds(self, segment: Segment) -> set[Generation]:
        """Generations of which a segment holds something."""
        return {
            slot.generation
            for slot in self.sealed(segment.layout.role)
            if slot.segment is segment and slot.parts
        }

    def unneeded(
        self, segment: Segment, successors: Callable[[Generation], int], kept: int
    ) -> bool:
        """True when nothing in an inactive segment can be asked for any more.

        A member overwrites generation g when it writes the one that comes as many places after it
        as there are slots; it may, because every role has committed something newer by then (design
        section 4). So as soon as anything that new is sealed here, whatever role it belongs to, g
        is not needed here either. ``successors(g)``: how many generations after g have certainly
        been written by then (layout.records). ``kept``: how many have to be, more than there are
        slots where others may be computed from g (layout.gradient_chain).
        """
        keys = [(segment.path.name, slot) for slot in range(segment.slots)]
        if any(self.pins[key] or key in self.writers for key in keys):
            return False
        held = self.holds(segment)
        # A segment without any was just made, for bytes that are on their way.
        return bool(held) and all(successors(generation) >= kept for generation in held)


def _sealed_slots(segment: Segment) -> Iterator[SealedSlot]:
    for slot in range(segment.slots):
        if segment.state(slot) is not SlotState.SEALED:
            continue
        generation = segment.generation(slot)
        parts = {}
        for part in segment.layout.parts:
            entry = segment.entry(slot, part.name)
            if entry.state is PartState.SEALED and entry.nbytes <= part.nbytes:
                parts[part.name] = entry
        # Its member may have begun to overwrite the slot while the header was read.
        if segment.state(slot) is SlotState.SEALED and segment.generation(slot) == generation:
            yield SealedSlot(segment, slot, generation, parts)


def _drop_parts(segment: Segment, slot: int, late: list[str], epoch: int) -> None:
    """Forget parts of an older epoch that were appended too late, or never sealed."""
    for part in segment.layout.parts:
        entry = segment.entry(slot, part.name)
        unwanted = part.name in late or entry.state is PartState.FILLED
        if unwanted and entry.state is not PartState.ABSENT and entry.epoch < epoch:
            segment.invalidate_part(slot, part.name, PartState.ABSENT)


def _is_torn(path: Path) -> bool:
    """True for a file that no version has finished: the magic is written last, and never zero."""
    with path.open("rb") as file:
        return not any(file.read(8))


def _settle_twins(segment: Segment) -> None:
    """After a kill in :meth:`Table.replace`: the new slot if it has all that the old one has.

    A slot of a copy loses all its sealed parts before it gets another generation, so one that is
    WRITING and has any is as it was.
    """
    for slot in range(segment.slots):
        if segment.state(slot) is not SlotState.WRITING:
            continue
        names = (part.name for part in segment.layout.parts)
        sealed = {n for n in names if segment.entry(slot, n).state is PartState.SEALED}
        if not sealed:
            continue
        twins = [s for s in _sealed_slots(segment) if s.generation == segment.generation(slot)]
        if any(sealed <= set(twin.parts) for twin in twins):
            segment.set_state(slot, SlotState.EMPTY)
            continue
        for twin in twins:
            segment.set_state(twin.slot, SlotState.EMPTY)
        segment.set_state(slot, SlotState.SEALED)
