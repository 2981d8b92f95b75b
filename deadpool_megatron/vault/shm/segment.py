"""One file of slots in shared memory, readable after a kill of its writer at any instruction.

File: header words, the description (JSON: layout, seat, slots, page size), then the slots. Every
range that gets memory, or is locked in memory, begins and ends at a page boundary of the host that
made the file. Slot: header (words below, one entry of 4 words per part), then the parts at fixed
page-aligned offsets. An ``own-*`` file is written by its member incarnation and sealed by the
vault, which puts restored parts there while that member waits for them; ``copy-*`` files are
written by the vault alone.

Order of stores. Each state is one aligned 8-byte word, stored whole by CPython's memoryview (one
``mov``/``str``), so no reader sees half of it. A writer invalidates the state word first and
validates it last. After a *kill* the order is settled: the kernel's context switch is a full
barrier, so the stores of a dead writer are seen in program order. Between *live* processes the
reader learns of a change by a socket message (the send and receive calls order the stores before
it, on x86 and ARM alike), or calls :func:`fence` before it reads. Only in freezing do both sides
store first and then read the other side's word: the vault stores FROZEN, calls :func:`fence` and
reads the states, while the member stores WRITING and reads FROZEN. The asymmetric barrier
(membarrier(2)) makes every running thread pass a full barrier between the vault's store and its
reads, so at least one side sees the other's store; the member's fast path stays a plain store and
load. FROZEN counts its changes, so the member also notices a freeze that has ended already.
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
FIRST_BYTES = 4096  # for the words below, whatever the page size; the description follows
W_MAGIC, W_FROZEN, W_LENGTH, W_CHECKSUM = range(4)
# A slot header in words of 8 bytes: eight, then entries of four each.
ENTRIES = 8
ENTRY_FIELDS = 4
_W_STATE, _W_LINEAGE, _W_ITERATION, _W_EPOCH = range(4)
_E_STATE, _E_NBYTES, _E_CHECKSUM, _E_EPOCH = range(4)
_HASH_BYTES = 16 << 20
_NAME = re.compile(r"(?:own-(\d+)-(\d+)\.(\d+)\.(\d+)|copy-(\d+)|dump-(\d+)-\d+)\.seg")


class SlotState(IntEnum):
    """The validity of the bytes of a slot."""

    EMPTY = 0
    WRITING = 1  # set before the first byte changes
    FILLED = 2  # own segments: the member has finished
    SEALED = 3  # the generation words are valid; the entries of parts have their own states


class PartState(IntEnum):
    """The validity of the bytes of a part."""

    ABSENT = 0
    FILLED = 1  # the member has finished; no checksum yet
    SEALED = 2
    BAD = 3  # the checksum did not match at a later read
    ELSEWHERE = 4  # other roles hold the bytes; the checksum is that of the owner


# Valid state words. Any other value is a stray store, and proves nothing.
_SLOT_STATES: Mapping[int, SlotState] = {state.value: state for state in SlotState}
_PART_STATES: Mapping[int, PartState] = {state.value: state for state in PartState}


@dataclass(frozen=True)
class PartEntry:
    """An entry of a slot header; ``epoch``: the epoch in which the part was filled or sealed. The
    ``checksum`` of a FILLED part is 0: any other value means that the header is damaged."""

    state: PartState
    nbytes: int
    checksum: int
    epoch: int


class Filled(NamedTuple):
    """Parts of a slot that its member has finished and the vault has to seal, with their bytes.
    ``damaged``: parts whose entry does not fit the generation in the slot's header; ``is_foreign``:
    the slot was written in another epoch, so it has no valid parts."""

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
    the header; only the current owner of a slot touches the bytes of its parts."""

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
        self.contents = memoryview(self._map)
        self._file_header = self.contents[:FIRST_BYTES].cast("Q")
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
        """Create the file with memory for the parts in ``reserve``; name it when it is whole.

        ``slots``: the number of slots, if not the layout's. ``budget``: the limit for all files of
        the directory; None for a dump on disk. Raises OutOfSpace with the place and the bytes
        needed.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        slots = layout.slots if slots is None else slots
        geometry = Geometry(layout, seat, slots, page_bytes)
        budget = budget or Budget(path.parent)
        temporary.unlink(missing_ok=True)  # left by a killed process with this process ID
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
        # The mapping is freed with its last memoryview, and the descriptor is closed last: so
        # os.close() frees the memory of an unlinked file, without the interpreter lock.
        if getattr(self, "contents", None) is not None:
            del self._file_header, self._slots, self.contents, self._map
            with contextlib.suppress(OSError):
                os.close(self._file)

    def _describe(self) -> None:
        header, description = self._file_header, self._geometry.description
        header[W_MAGIC] = 0
        header[W_LENGTH] = len(description)
        header[W_CHECKSUM] = xxhash.xxh3_64_intdigest(description)
        self.contents[FIRST_BYTES : FIRST_BYTES + len(description)] = description
        header[W_MAGIC] = MAGIC

    def become(self, path: Path, layout: RoleLayout) -> bool:
        """Turn an unwritten segment into that of another role with parts of the same sizes, and
        name it when it is whole. False for other sizes."""
        own = self._geometry
        geometry = Geometry(layout, self.seat, self.slots, own.page_bytes)
        positions = [(each.first, each.stride, each.offsets) for each in (geometry, own)]
        if positions[0] != positions[1] or layout.slots != self.slots:
            return False
        self.layout, self._geometry = layout, geometry
        self._describe()
        self.path.rename(path)
        self.path = path
        return True

    def adopt_name(self, path: Path) -> bool:
        """Adopt the name ``path`` if another process has given it to this file by :meth:`become`.
        Return False otherwise. The mapping stays."""
        if not self.maps(path):
            return False
        self.layout, self._geometry = read_description(self._file, path, self.seat)
        self._index = {part.name: i for i, part in enumerate(self.layout.parts)}
        self.path = path
        return True

    def maps(self, path: Path) -> bool:
        """Return whether ``path`` names this file."""
        return os.path.samestat(path.stat(), os.fstat(self._file))

    def keep_name(self) -> bool:
        """Restore a name that another program has removed, for the lifetime of this process;
        return whether it was missing. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if self.maps(self.path):
                return False
        # No new name can be linked to a file that has lost its last name.
        self.path.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
        return True

    def reserve(self, names: Collection[str], slots: Collection[int] | None = None) -> None:
        """Allocate memory for the named parts of all or some slots, if they have none.

        Raises OutOfSpace. A copy allocates memory for parts as they are shipped.
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
        """Free the memory of parts of a slot, whose bytes are lost. Return the freed bytes: none on
        a file system without support."""
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
        """Return whether the member must not write. The vault may change this at any time."""
        return self.freezes() % 2 == 1

    def freezes(self) -> int:
        """Return the number of changes between allowed and forbidden; odd while forbidden."""
        return int(self._file_header[W_FROZEN])

    def freeze(self, value: bool) -> None:
        """Forbid the member to write, or allow it again.

        The changes are counted: a member that was stopped while it took a slot notices that writing
        was forbidden meanwhile, even if it is allowed again.
        """
        if self.is_frozen() != value:
            # Bounded, so that a damaged word cannot overflow.
            self._store(self._file_header, W_FROZEN, (self.freezes() + 1) % (1 << 32))

    def state(self, slot: int) -> SlotState:
        """Return the state of a slot, EMPTY for an invalid word."""
        return _SLOT_STATES.get(self._slots[slot][_W_STATE], SlotState.EMPTY)

    def invalid_states(self) -> Iterator[tuple[int, str, int]]:
        """Yield the invalid state words: slot, part (or "slot"), and the word."""
        for slot, header in enumerate(self._slots):
            if (state := header[_W_STATE]) not in _SLOT_STATES:
                yield slot, "slot", state
            for name in self._index:
                if (state := header[self._entry(name) + _E_STATE]) not in _PART_STATES:
                    yield slot, name, state

    def generation(self, slot: int) -> Generation:
        """Return the generation of a slot; it is meaningless if the slot is EMPTY, or if its writer
        was killed while WRITING."""
        header = self._slots[slot]
        return Generation(header[_W_LINEAGE], header[_W_ITERATION])

    def epoch(self, slot: int) -> int:
        """Return the epoch in which the slot was last taken."""
        return int(self._slots[slot][_W_EPOCH])

    def entry(self, slot: int, name: str) -> PartEntry:
        """Return the header entry of a part, BAD for an invalid word. Raises KeyError for an
        unknown part."""
        header, base = self._slots[slot], self._entry(name)
        return PartEntry(
            _PART_STATES.get(header[base + _E_STATE], PartState.BAD),
            header[base + _E_NBYTES],
            header[base + _E_CHECKSUM] ^ self._identity(slot, name),
            header[base + _E_EPOCH],
        )

    def entries(self, slot: int) -> dict[str, PartEntry]:
        """Return the header entries of a slot by part, in the order of the layout."""
        return {name: self.entry(slot, name) for name in self._index}

    def sealed_slots(self) -> Iterator[tuple[int, Generation, dict[str, PartEntry]]]:
        """Yield each sealed slot with its generation and entries."""
        for slot in range(self.slots):
            if self.state(slot) is SlotState.SEALED:
                generation, entries = self.generation(slot), self.entries(slot)
                # Its member may have begun to overwrite the slot while the header was read.
                if self.state(slot) is SlotState.SEALED and self.generation(slot) == generation:
                    yield slot, generation, entries

    def filled(self, epoch: int) -> Iterator[Filled]:
        """Yield the parts that the member has finished in this epoch, the oldest slot first."""
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
                    # The slot may just have been taken for another generation: read again.
                    if self.entry(slot, part.name) == entry:
                        found.damaged.append(part.name)
                elif entry.state in ready and entry.epoch == epoch and entry.nbytes <= part.nbytes:
                    found.parts[part.name] = entry, self.data(slot, part.name, entry.nbytes)
            if found.parts:
                settle()
            if found.parts or found.damaged:
                yield found

    def _identity(self, slot: int, name: str) -> int:
        """Return the hash that is combined with every checksum, so that a checksum matches only for
        this part of this generation of this role."""
        header = self._slots[slot]
        text = f"{self.layout.role}/{header[_W_LINEAGE]}/{header[_W_ITERATION]}/{name}"
        return int(xxhash.xxh3_64_intdigest(text.encode()))

    def offset(self, slot: int, name: str) -> int:
        """Return the position of a part in the file, a multiple of the page size."""
        geometry = self._geometry
        return geometry.first + slot * geometry.stride + geometry.offsets[name]

    def data(self, slot: int, name: str, nbytes: int | None = None) -> memoryview:
        """Return writable bytes of a part: the first ``nbytes``, or its whole capacity."""
        start = self.offset(slot, name)
        return self.contents[start : start + (self.capacity(name) if nbytes is None else nbytes)]

    def read_into(self, slot: int, name: str, start: int, target: memoryview) -> None:
        """Read bytes of a part into ``target`` by a system call: page faults of the mapping would
        hold the interpreter lock. Raises SegmentError when the file is too short."""
        position = self.offset(slot, name) + start
        done = 0
        while done < len(target):
            count = os.preadv(self._file, [target[done:]], position + done)
            if count == 0:
                raise SegmentError(f"{self.path} ends early")
            done += count

    def write_from(self, slot: int, name: str, start: int, source: memoryview) -> None:
        """Write bytes of a part to a dump on disk."""
        position = self.offset(slot, name) + start
        done = 0
        while done < len(source):
            done += os.pwrite(self._file, source[done:], position + done)

    def flush(self) -> None:
        """Write all changes to the disk."""
        self._map.flush()
        os.fsync(self._file)

    # Writing by the member, own segments only.

    def mark_writing(self, slot: int) -> SlotState:
        """Invalidate the slot and return its former state, for :meth:`back_out`."""
        before = self.state(slot)
        self._store(self._slots[slot], _W_STATE, SlotState.WRITING)
        return before

    def back_out(self, slot: int, before: SlotState) -> None:
        """Undo :meth:`mark_writing`, unless the vault has undone it or used the slot meanwhile."""
        if self.state(slot) is SlotState.WRITING:
            self._store(self._slots[slot], _W_STATE, before)

    def begin(self, slot: int, generation: Generation, epoch: int) -> None:
        """Set the generation of a slot that is marked WRITING."""
        header = self._slots[slot]
        for name in self._index:
            self._store(header, self._entry(name) + _E_STATE, PartState.ABSENT)
        self._store(header, _W_LINEAGE, generation.lineage)
        self._store(header, _W_ITERATION, generation.iteration)
        self._store(header, _W_EPOCH, epoch)

    def fill(self, slot: int, parts: Mapping[str, int], epoch: int) -> None:
        """Declare the bytes of a slot complete."""
        for name, nbytes in parts.items():
            self.fill_part(slot, name, nbytes, epoch)
        self._store(self._slots[slot], _W_STATE, SlotState.FILLED)

    def fill_part(self, slot: int, name: str, nbytes: int, epoch: int) -> None:
        """Declare the bytes of a part complete."""
        self.seal_part(slot, name, nbytes, 0, epoch, PartState.FILLED)

    # Writing by the vault.

    def open_slot(self, slot: int, generation: Generation, epoch: int) -> None:
        """Assign a slot of a copy to a generation, without parts."""
        self.mark_writing(slot)
        self.begin(slot, generation, epoch)
        self._store(self._slots[slot], _W_STATE, SlotState.SEALED)

    def invalidate_part(self, slot: int, name: str, state: PartState) -> None:
        """Mark a part ABSENT before its bytes change, or BAD if they are damaged."""
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
        """Record size and checksum of a part. With ELSEWHERE they are the owner's, and no bytes of
        the part are here."""
        header, base = self._slots[slot], self._entry(name)
        self._store(header, base + _E_NBYTES, nbytes)
        self._store(header, base + _E_CHECKSUM, digest ^ self._identity(slot, name))
        self._store(header, base + _E_EPOCH, epoch)
        self._store(header, base + _E_STATE, state)

    def set_state(self, slot: int, state: SlotState) -> None:
        """Set SEALED after the parts of a FILLED slot were sealed, or EMPTY to drop them."""
        self._store(self._slots[slot], _W_STATE, state)

    def _entry(self, name: str) -> int:
        return ENTRIES + ENTRY_FIELDS * self._index[name]

    def _store(self, header: memoryview, index: int, value: int) -> None:
        """Store a word of a live segment; only here, so that tests can stop after any store."""
        header[index] = value


class Geometry:
    """The description of a segment, and the positions of its slots and parts."""

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
        self.header = self.pages(8 * (ENTRIES + ENTRY_FIELDS * len(layout.parts)))
        self.offsets: dict[str, int] = {}
        self.stride = self.header
        for part in layout.parts:
            self.offsets[part.name] = self.stride
            self.stride += self.pages(part.nbytes)
        self.nbytes = self.first + self.stride * slots

    def pages(self, nbytes: int) -> int:
        """Return ``nbytes``, rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes


def read_description(file: int, path: Path, seat: Seat | None) -> tuple[RoleLayout, Geometry]:
    """Return the description of an open segment file. Raises SegmentError, or DamagedSegment for a
    description that has changed since it was written."""
    header = memoryview(os.pread(file, FIRST_BYTES, 0).ljust(FIRST_BYTES, b"\0")).cast("Q")
    length = min(header[W_LENGTH], 64 << 20)
    text = os.pread(file, length, FIRST_BYTES)
    if header[W_MAGIC] != MAGIC:
        raise SegmentError(f"{path} is no segment of this version")
    if (digest := xxhash.xxh3_64_intdigest(text)) != header[W_CHECKSUM]:
        reason = f"{path} is not a whole segment: its description is damaged"
        raise DamagedSegment(reason, header[W_CHECKSUM], digest)
    try:
        described = json.loads(text)
        layout = RoleLayout.from_dict(described["layout"])
        pages = int(described["page_bytes"])
        return layout, Geometry(layout, seat, int(described["slots"]), pages)
    except (KeyError, TypeError, ValueError) as error:
        raise SegmentError(f"{path}: description not understood: {error}") from error


def own_name(role: int, seat: Seat) -> str:
    """Return the name of the segment that a member incarnation writes."""
    return f"own-{role}-{seat.node}.{seat.local_rank}.{seat.incarnation}.seg"


def copy_name(role: int) -> str:
    """Return the name of the segment with copies of a role that is seated elsewhere."""
    return f"copy-{role}.seg"


def dump_name(role: int, node: int) -> str:
    """Return the file name of a role's dump by the vault of ``node``."""
    return f"dump-{role}-{node}.seg"


def parse_name(name: str) -> tuple[int, Seat | None]:
    """Return role and seat, no seat for a copy. Raises SegmentError for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise SegmentError(f"{name!r} is not the name of a segment")
    if match[1] is None:
        return int(match[5] or match[6]), None
    return int(match[1]), Seat(int(match[2]), int(match[3]), int(match[4]))


def fence() -> None:
    """Make every running thread of the host pass a full memory barrier, which takes about 10 ms.
    Without the system call, pause for far longer than any store buffer needs to drain."""
    number = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
    global_barrier = 1
    if number is None or ctypes.CDLL(None).syscall(number, global_barrier, 0, 0) != 0:
        time.sleep(0.01)


def settle() -> None:
    """Order the reads of bytes that a live member has just declared FILLED.

    x86 shows the stores of a processor in their order. On other processors a reader that did not
    wait for the member's message could see the state word of a slot before the bytes.
    """
    if platform.machine() != "x86_64":
        fence()
