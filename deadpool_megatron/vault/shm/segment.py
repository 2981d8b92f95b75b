"""One file of slots in shared memory, readable after a kill of its writer at any instruction.

File: words, the description (JSON: layout, seat, slots, page size), then the slots: as many as the
layout says, or more where steps are kept (layout.gradient_chain). Everything that gets memory, or
is locked in it, begins and ends with a page of the host that made the file.
Slot: header (words below, one entry of 4 words per part), then the parts at fixed page-aligned
offsets. An ``own-*`` file is written by one member incarnation and sealed by the vault,
which puts restored parts there while that member waits for them; ``copy-*`` and ``steps-*`` files
are written by the vault alone.

Order of stores. Each state is one aligned 8-byte word, stored whole by CPython's memoryview (one
``mov``/``str``), so no reader sees half of it. A writer invalidates the state word first and
validates it last. After a *kill* the order is settled: the kernel's context switch is a full
barrier, so what a dead writer stored before the kill is seen in program order. Between *live*
processes the reader learns of a change by a socket message (the send and receive calls order the
stores before it, on x86 and ARM alike), or calls :func:`fence` before it reads. The one place where
both sides store first and then read the other's word is freezing: the vault stores FROZEN, calls
:func:`fence`, reads the states; the member stores WRITING and reads FROZEN. The asymmetric barrier
(membarrier(2)) makes every running thread pass a full barrier between the vault's store and its
reads, so one of the two must see the other; the member's fast path stays a plain store and load.
FROZEN is a count of changes, so that the member sees a freeze that is over by then, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import xxhash

from deadpool_megatron.layout.memory_needs import PAGE_BYTES
from deadpool_megatron.layout.records import Generation, RoleLayout, Seat
from deadpool_megatron.vault.errors import DamagedSegment, SegmentError
from deadpool_megatron.vault.memory import BLOCK_BYTES, Budget

MAGIC = 0x3230_4745_5350_4D44  # "DMPSEG02", little endian
FIRST_BYTES = 4096  # of the file, whatever a page is: the words below; then the description
W_MAGIC, W_FROZEN, W_LENGTH, W_CHECKSUM = range(4)
# Of a slot header, in words of 8 bytes: eight, then entries of four each.
ENTRIES = 8
ENTRY_WORDS = 4
_W_STATE, _W_LINEAGE, _W_ITERATION, _W_EPOCH = range(4)
_E_STATE, _E_NBYTES, _E_CHECKSUM, _E_EPOCH = range(4)
_HASH_BYTES = 16 << 20
_NAME = re.compile(r"(?:own-(\d+)-(\d+)\.(\d+)\.(\d+)|(?:copy|steps)-(\d+)|dump-(\d+)-\d+)\.seg")


class SlotState(IntEnum):
    """The worth of the bytes of a slot."""

    EMPTY = 0
    WRITING = 1  # set before the first byte changes
    FILLED = 2  # own segments: the member has finished
    SEALED = 3  # the generation words hold; parts count as their entries say


class PartState(IntEnum):
    """The worth of the bytes of one part."""

    ABSENT = 0
    FILLED = 1  # the member has finished; no checksum yet
    SEALED = 2
    BAD = 3  # the checksum did not match when it was read again
    ELSEWHERE = 4  # other roles hold the bytes; the checksum is that of the owner


# Valid state words. Any other value is a stray store, and proves nothing.
_SLOT_STATES: Mapping[int, SlotState] = {state.value: state for state in SlotState}
_PART_STATES: Mapping[int, PartState] = {state.value: state for state in PartState}


@dataclass(frozen=True)
class PartEntry:
    """One entry of a slot header; ``epoch`` is the one in which it was filled or sealed, the
    ``checksum`` of a FILLED part is 0: any other value means that the header is damaged."""

    state: PartState
    nbytes: int
    checksum: int
    epoch: int


class Filled(NamedTuple):
    """Parts of a slot that its member has finished, and that are not sealed yet, with their bytes.
    ``damaged``: names in whose entry another generation stands than in the header of the slot;
    ``is_foreign``: the slot was written in another epoch, and nothing of it counts."""

    slot: int
    generation: Generation
    parts: dict[str, tuple[PartEntry, memoryview]]
    damaged: list[str]
    is_foreign: bool


def checksum(view: memoryview) -> int:
    """Return the checksum of bytes; the interpreter lock is free while a piece is hashed."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(view), _HASH_BYTES):
        digest.update(view[start : start + _HASH_BYTES])
    return int(digest.intdigest())


class Segment:
    """A mapped segment file. Not thread-safe: the vault's lock or the member's one thread guards
    the header; the owner of a slot at a time touches the bytes of its parts."""

    def __init__(
        self,
        path: Path,
        layout: RoleLayout,
        seat: Seat | None,
        file: int,
        geometry: Geometry,
        writable: bool = True,
        budget: Budget | None = None,
    ) -> None:
        self.path = path
        self._budget = budget or Budget(path.parent)
        self.layout = layout
        self.seat = seat
        self.slots = geometry.slots
        self._file = file
        self._index = {part.name: i for i, part in enumerate(layout.parts)}
        self._geometry = geometry
        self.nbytes = geometry.nbytes
        self._reserved: set[tuple[int, str]] = set()
        try:
            size = os.fstat(file).st_size
            if size < self.nbytes:
                raise SegmentError(f"{path} has {size} bytes instead of {self.nbytes}")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(file, self.nbytes, access=access)
        except BaseException:
            os.close(file)
            raise
        self.contents = memoryview(self._map)  # of the whole file
        self._words = self.contents[:FIRST_BYTES].cast("Q")
        self._slots = [
            self.contents[start : start + geometry.header].cast("Q")
            for start in (geometry.first + i * geometry.stride for i in range(geometry.slots))
        ]

    @staticmethod
    def create(
        path: Path,
        layout: RoleLayout,
        seat: Seat | None,
        reserve: Collection[str],
        slots: int | None = None,
        budget: Budget | None = None,
        page_bytes: int = PAGE_BYTES,
    ) -> Segment:
        """Create the file with memory for the parts in ``reserve``; it gets its name when whole.

        ``slots``: their number, if not that of the layout. ``budget``: the limit for all files
        there; none for a dump on disk. Raises NoRoom, naming where and the bytes needed.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        slots = layout.slots if slots is None else slots
        geometry = Geometry(layout, seat, slots, page_bytes)
        budget = budget or Budget(path.parent)
        temporary.unlink(missing_ok=True)  # of a process of this number that was killed
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o600)
        try:
            os.ftruncate(file, geometry.nbytes)
            headers = [
                (geometry.first + slot * geometry.stride, geometry.header) for slot in range(slots)
            ]
            budget.allocate(file, path, [(0, geometry.first), *headers])
        except BaseException:
            os.close(file)
            temporary.unlink(missing_ok=True)
            raise
        try:
            segment = Segment(path, layout, seat, file, geometry, budget=budget)
            segment.reserve(reserve)
            segment._describe()
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return segment

    @staticmethod
    def open(
        path: Path, writable: bool = True, budget: Budget | None = None, seat: Seat | None = None
    ) -> Segment:
        """Map an existing file; ``seat``: for a file that is not named yet. Raises SegmentError
        when it is not whole, OSError when absent."""
        role = None
        if seat is None:
            role, seat = parse_name(path.name)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags)
        try:
            layout, geometry = read_description(file, path, seat)
            if role not in (None, layout.role):
                raise SegmentError(f"{path} holds role {layout.role}")
        except BaseException:
            os.close(file)
            raise
        return Segment(path, layout, seat, file, geometry, writable, budget)

    def __del__(self) -> None:
        # The mapping goes with its last memoryview. Then the memory, if the file has no name any
        # more: with the file, as os.close() does not hold the interpreter lock.
        if getattr(self, "contents", None) is not None:
            del self._words, self._slots, self.contents, self._map
            with contextlib.suppress(OSError):
                os.close(self._file)

    def _describe(self) -> None:
        words, description = self._words, self._geometry.description
        words[W_MAGIC] = 0
        words[W_LENGTH] = len(description)
        words[W_CHECKSUM] = xxhash.xxh3_64_intdigest(description)
        self.contents[FIRST_BYTES : FIRST_BYTES + len(description)] = description
        words[W_MAGIC] = MAGIC

    def become(self, path: Path, layout: RoleLayout) -> bool:
        """Turn it, while nothing was written into it, into the segment of another role with parts
        of the same sizes; it gets that name when whole. False for other sizes."""
        own = self._geometry
        geometry = Geometry(layout, self.seat, self.slots, own.page_bytes)
        places = [(one.first, one.stride, one.offsets) for one in (geometry, own)]
        if places[0] != places[1] or layout.slots != self.slots:
            return False
        self.layout, self._geometry = layout, geometry
        self._describe()
        self.path.rename(path)
        self.path = path
        return True

    def is_now(self, path: Path) -> bool:
        """Take over the name ``path`` if another process has made it the name of this very file by
        :meth:`become`; False if it has not. The mapping stays."""
        if not self.maps(path):
            return False
        self.layout, self._geometry = read_description(self._file, path, self.seat)
        self._index = {part.name: i for i, part in enumerate(self.layout.parts)}
        self.path = path
        return True

    def maps(self, path: Path) -> bool:
        """Return whether ``path`` is this very file."""
        return os.path.samestat(path.stat(), os.fstat(self._file))

    def keep_name(self) -> bool:
        """Restore a name that another program has removed, for as long as this process lives;
        return whether it was gone. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if self.maps(self.path):
                return False
        # A file without a name cannot get one any more.
        self.path.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
        return True

    def reserve(self, names: Collection[str], slots: Collection[int] | None = None) -> None:
        """Allocate memory for the named parts of all or some slots, once.

        Raises NoRoom. A copy allocates memory for parts as they are shipped.
        """
        wanted = {
            (slot, name)
            for slot in (range(self.slots) if slots is None else slots)
            for name in names
        } - self._reserved
        pages = self._geometry.pages
        ranges = [(self.offset(slot, n), pages(self.capacity(n))) for slot, n in sorted(wanted)]
        self._budget.allocate(self._file, self.path, ranges)
        self._reserved |= wanted

    def give_back(self, names: Collection[str], slot: int) -> int:
        """Free the memory of parts of a slot, which must not be read any more, and return its
        bytes. A file system without support keeps it.
        """
        before = os.fstat(self._file).st_blocks
        for name in names:
            size = self._geometry.pages(self.capacity(name))
            if size:
                with contextlib.suppress(OSError):
                    self._map.madvise(mmap.MADV_REMOVE, self.offset(slot, name), size)
            self._reserved.discard((slot, name))
        return max(0, before - os.fstat(self._file).st_blocks) * BLOCK_BYTES

    def capacity(self, name: str) -> int:
        """Return the maximum bytes of a part. Raises KeyError for an unknown part."""
        return self.layout.parts[self._index[name]].nbytes

    # Reading.

    def is_frozen(self) -> bool:
        """True while the member must not write. Another process changes it at any time."""
        return self.freezes() % 2 == 1

    def freezes(self) -> int:
        """Return how often the member was forbidden to write, or allowed again; odd while
        forbidden."""
        return int(self._words[W_FROZEN])

    def freeze(self, value: bool) -> None:
        """Forbid the member to write, or let it again.

        The changes are counted: a member that was stopped while it took a slot sees that it was
        forbidden to, even if it is allowed again.
        """
        if self.is_frozen() != value:
            # Bounded, so that a damaged word cannot overflow when it is counted on.
            self._store(self._words, W_FROZEN, (self.freezes() + 1) % (1 << 32))

    def state(self, slot: int) -> SlotState:
        """Return the state of a slot, EMPTY for a word without meaning."""
        return _SLOT_STATES.get(self._slots[slot][_W_STATE], SlotState.EMPTY)

    def foreign_words(self) -> Iterator[tuple[int, str, int]]:
        """Yield state words without meaning: slot, part (or "slot"), and the word."""
        for slot, words in enumerate(self._slots):
            if (word := words[_W_STATE]) not in _SLOT_STATES:
                yield slot, "slot", word
            for name in self._index:
                if (word := words[self._entry(name) + _E_STATE]) not in _PART_STATES:
                    yield slot, name, word

    def generation(self, slot: int) -> Generation:
        """Meaningful unless the slot is EMPTY or was WRITING when its writer was killed."""
        words = self._slots[slot]
        return Generation(words[_W_LINEAGE], words[_W_ITERATION])

    def epoch(self, slot: int) -> int:
        """Return the epoch in which the slot was last taken."""
        return int(self._slots[slot][_W_EPOCH])

    def entry(self, slot: int, name: str) -> PartEntry:
        """Return the header entry of a part, BAD for a word without meaning. Raises KeyError for an
        unknown part."""
        words, base = self._slots[slot], self._entry(name)
        return PartEntry(
            _PART_STATES.get(words[base + _E_STATE], PartState.BAD),
            words[base + _E_NBYTES],
            words[base + _E_CHECKSUM] ^ self._identity(slot, name),
            words[base + _E_EPOCH],
        )

    def filled(self, epoch: int) -> Iterator[Filled]:
        """Yield the parts that the member has finished in this epoch, by slot, the oldest first."""
        for slot in sorted(range(self.slots), key=self.generation):
            state, generation = self.state(slot), self.generation(slot)
            # A vault that died while it sealed has left some parts SEALED in a FILLED slot.
            ready: tuple[PartState, ...] = (PartState.FILLED, PartState.SEALED)
            if state is SlotState.SEALED:
                ready = (PartState.FILLED,)
            elif state is not SlotState.FILLED:
                continue
            elif self.epoch(slot) != epoch or generation.lineage != epoch:
                yield Filled(slot, generation, {}, [], is_foreign=True)
                continue
            found = Filled(slot, generation, {}, [], is_foreign=False)
            for part in self.layout.parts:
                entry = self.entry(slot, part.name)
                if entry.state is PartState.FILLED and entry.checksum:
                    # If the slot has not just been taken again, its header is damaged.
                    if self.entry(slot, part.name) == entry:
                        found.damaged.append(part.name)
                elif entry.state in ready and entry.epoch == epoch and entry.nbytes <= part.nbytes:
                    found.parts[part.name] = entry, self.data(slot, part.name, entry.nbytes)
            if found.parts:
                settle()
            if found.parts or found.damaged:
                yield found

    def _identity(self, slot: int, name: str) -> int:
        """Return the hash that every checksum is combined with: a checksum matches only for this
        part of this generation of this role, as in the header.
        """
        words = self._slots[slot]
        text = f"{self.layout.role}/{words[_W_LINEAGE]}/{words[_W_ITERATION]}/{name}"
        return int(xxhash.xxh3_64_intdigest(text.encode()))

    def offset(self, slot: int, name: str) -> int:
        """Position of a part in the file, a multiple of the page size."""
        geometry = self._geometry
        return geometry.first + slot * geometry.stride + geometry.offsets[name]

    def data(self, slot: int, name: str, nbytes: int | None = None) -> memoryview:
        """Writable bytes of a part: ``nbytes`` of them, or its capacity."""
        start = self.offset(slot, name)
        return self.contents[start : start + (self.capacity(name) if nbytes is None else nbytes)]

    def read_into(self, slot: int, name: str, start: int, target: memoryview) -> None:
        """Read file bytes of a part into ``target`` (a dump on disk; page faults would hold the
        interpreter lock). Raises SegmentError when the file is too short."""
        position = self.offset(slot, name) + start
        done = 0
        while done < len(target):
            count = os.preadv(self._file, [target[done:]], position + done)
            if count == 0:
                raise SegmentError(f"{self.path} ends early")
            done += count

    def write_from(self, slot: int, name: str, start: int, source: memoryview) -> None:
        """Write bytes of a part to the file (a dump on disk)."""
        position = self.offset(slot, name) + start
        done = 0
        while done < len(source):
            done += os.pwrite(self._file, source[done:], position + done)

    def flush(self) -> None:
        """Write everything to the disk."""
        self._map.flush()
        os.fsync(self._file)

    # Writing by the member, own segments only.

    def mark_writing(self, slot: int) -> SlotState:
        """Invalidate the slot; returns the state before, for :meth:`back_out`."""
        before = self.state(slot)
        self._store(self._slots[slot], _W_STATE, SlotState.WRITING)
        return before

    def back_out(self, slot: int, before: SlotState) -> None:
        """Undo :meth:`mark_writing`, unless the vault has done so or has used the slot since."""
        if self.state(slot) is SlotState.WRITING:
            self._store(self._slots[slot], _W_STATE, before)

    def begin(self, slot: int, generation: Generation, epoch: int) -> None:
        """Name the generation that is written into a slot marked WRITING."""
        words = self._slots[slot]
        for name in self._index:
            self._store(words, self._entry(name) + _E_STATE, PartState.ABSENT)
        self._store(words, _W_LINEAGE, generation.lineage)
        self._store(words, _W_ITERATION, generation.iteration)
        self._store(words, _W_EPOCH, epoch)

    def fill(self, slot: int, parts: Mapping[str, int], epoch: int) -> None:
        """Declare the bytes of a slot complete."""
        for name, nbytes in parts.items():
            self.fill_part(slot, name, nbytes, epoch)
        self._store(self._slots[slot], _W_STATE, SlotState.FILLED)

    def fill_part(self, slot: int, name: str, nbytes: int, epoch: int) -> None:
        """Declare the bytes of one part complete."""
        self.seal_part(slot, name, nbytes, 0, epoch, PartState.FILLED)

    # Writing by the vault.

    def open_slot(self, slot: int, generation: Generation, epoch: int) -> None:
        """Give a copy's slot to a generation; it has no parts yet."""
        self.mark_writing(slot)
        self.begin(slot, generation, epoch)
        self._store(self._slots[slot], _W_STATE, SlotState.SEALED)

    def invalidate_part(self, slot: int, name: str, state: PartState) -> None:
        """ABSENT before its bytes change, BAD when they turned out to be damaged."""
        self._store(self._slots[slot], self._entry(name) + _E_STATE, state)

    def seal_part(
        self,
        slot: int,
        name: str,
        nbytes: int,
        digest: int,
        epoch: int,
        state: PartState = PartState.SEALED,
    ) -> None:
        """Record size and checksum of a part; with ELSEWHERE those of its owner for an ABSENT
        part."""
        words, base = self._slots[slot], self._entry(name)
        self._store(words, base + _E_NBYTES, nbytes)
        self._store(words, base + _E_CHECKSUM, digest ^ self._identity(slot, name))
        self._store(words, base + _E_EPOCH, epoch)
        self._store(words, base + _E_STATE, state)

    def set_state(self, slot: int, state: SlotState) -> None:
        """SEALED after the parts of a FILLED slot were sealed; EMPTY to drop a generation."""
        self._store(self._slots[slot], _W_STATE, state)

    def _entry(self, name: str) -> int:
        return ENTRIES + ENTRY_WORDS * self._index[name]

    def _store(self, words: memoryview, index: int, value: int) -> None:
        """The only place where a word of a live segment changes (tests cut off after any)."""
        words[index] = value


class Geometry:
    """Derived from the description alone."""

    def __init__(
        self, layout: RoleLayout, seat: Seat | None, slots: int, page_bytes: int = PAGE_BYTES
    ) -> None:
        described: dict[str, object] = {"layout": layout.to_dict()}
        described["seat"] = seat.to_list() if seat else None
        described |= {"slots": slots, "page_bytes": page_bytes}
        self.slots = slots
        self.page_bytes = page_bytes
        self.description = json.dumps(described, separators=(",", ":"), sort_keys=True).encode()
        self.first = self.pages(FIRST_BYTES + len(self.description))
        self.header = self.pages(8 * (ENTRIES + ENTRY_WORDS * len(layout.parts)))
        self.offsets: dict[str, int] = {}
        self.stride = self.header
        for part in layout.parts:
            self.offsets[part.name] = self.stride
            self.stride += self.pages(part.nbytes)
        self.nbytes = self.first + self.stride * slots

    def pages(self, nbytes: int) -> int:
        """Return the bytes of the whole pages that ``nbytes`` take."""
        return -(-nbytes // self.page_bytes) * self.page_bytes


def read_description(file: int, path: Path, seat: Seat | None) -> tuple[RoleLayout, Geometry]:
    """Return the description of an open segment file. Raises SegmentError, or DamagedSegment for a
    description that has changed since it was written."""
    words = memoryview(os.pread(file, FIRST_BYTES, 0).ljust(FIRST_BYTES, b"\0")).cast("Q")
    length = min(words[W_LENGTH], 64 << 20)
    text = os.pread(file, length, FIRST_BYTES)
    if words[W_MAGIC] != MAGIC:
        raise SegmentError(f"{path} is no segment of this version")
    if (digest := xxhash.xxh3_64_intdigest(text)) != words[W_CHECKSUM]:
        reason = f"{path} is not a whole segment: its description is damaged"
        raise DamagedSegment(reason, words[W_CHECKSUM], digest)
    try:
        described = json.loads(text)
        layout = RoleLayout.from_dict(described["layout"])
        pages = int(described["page_bytes"])
        return layout, Geometry(layout, seat, int(described["slots"]), pages)
    except (KeyError, TypeError, ValueError) as error:
        raise SegmentError(f"{path}: description not understood: {error}") from error


def own_name(role: int, seat: Seat) -> str:
    """File name of the segment that one member incarnation writes."""
    return f"own-{role}-{seat.node}.{seat.local_rank}.{seat.incarnation}.seg"


def copy_name(role: int) -> str:
    """File name of the segment in which a vault keeps copies of a role that is seated elsewhere, or
    the one that a role which is seated here is recomputed from."""
    return f"copy-{role}.seg"


def steps_name(role: int) -> str:
    """File name of the segment in which a vault keeps the steps that lead on from these copies."""
    return f"steps-{role}.seg"


def dump_name(role: int, node: int) -> str:
    """Return the file name of a role's dump by the vault of ``node``."""
    return f"dump-{role}-{node}.seg"


def parse_name(name: str) -> tuple[int, Seat | None]:
    """``(role, seat)``; no seat for a copy. Raises SegmentError for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise SegmentError(f"{name!r} is not the name of a segment")
    if match[1] is None:
        return int(match[5] or match[6]), None
    return int(match[1]), Seat(int(match[2]), int(match[3]), int(match[4]))


def fence() -> None:
    """Make every running thread of the host pass a full memory barrier; about 10 ms.

    Where the system call is missing, a pause far longer than any store buffer takes to drain.
    """
    number = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
    global_barrier = 1
    if number is None or ctypes.CDLL(None).syscall(number, global_barrier, 0, 0) != 0:
        time.sleep(0.01)


def settle() -> None:
    """Before reading bytes that a live member has just declared FILLED.

    x86 shows the stores of one processor in their order. Elsewhere the state word of a slot could
    be seen before the bytes, when it is seen before the member's message about it has arrived.
    """
    if platform.machine() != "x86_64":
        fence()
