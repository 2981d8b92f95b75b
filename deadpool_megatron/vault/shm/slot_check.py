"""Compares every sealed part of segment files with its checksum, while their owners may write.

Files are mapped read-only. A live member or vault that overwrites a slot invalidates its header
before the first byte changes, so the header shows afterwards whether the bytes hashed were sealed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import xxhash

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.errors import SegmentError
from deadpool_megatron.vault.shm.segment import PartEntry, PartState, Segment, SlotState, fence

_PIECE_BYTES = 16 << 20


class Verdict(StrEnum):
    """The outcome of a check."""

    GOOD = "good"
    BUSY = "busy"  # being written when the check began, or overwritten during it
    UNKNOWN = "not verified"  # no checksum is known
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """The outcome for a part (or file). ``reason``: why it is not good."""

    path: Path
    name: str
    nbytes: int
    verdict: Verdict
    reason: str = ""
    role: int | None = None
    generation: Generation | None = None


Progress = Callable[[int], None]


def segment_files(directory: Path) -> list[Path]:
    """Return the finished segments in the directory of a node or a dump."""
    return sorted(p for p in directory.glob("*.seg") if not p.name.startswith("."))


def verify_segment(path: Path, progress: Progress) -> Iterator[Finding]:
    """Yield a finding for each sealed part; ``progress`` gets the bytes hashed since its last call.

    A file that its vault has removed in the meantime has no findings.
    """
    try:
        segment = Segment.open(path, writable=False)
    except FileNotFoundError:
        return
    except (SegmentError, OSError) as error:
        yield Finding(path, "file", 0, Verdict.BAD, str(error))
        return
    role = segment.layout.role
    for slot in range(segment.slots):
        if segment.state(slot) in (SlotState.WRITING, SlotState.FILLED):
            yield Finding(path, f"slot {slot}", 0, Verdict.BUSY, "is being written", role)
    for slot, generation, entries in list(segment.sealed_slots()):
        for name, entry in entries.items():
            if entry.state in (PartState.SEALED, PartState.BAD):
                verdict, reason = _verify(segment, slot, generation, name, entry, progress)
                yield Finding(path, name, entry.nbytes, verdict, reason, role, generation)


def _verify(
    segment: Segment,
    slot: int,
    generation: Generation,
    name: str,
    entry: PartEntry,
    progress: Progress,
) -> tuple[Verdict, str]:
    if entry.state is PartState.BAD:
        progress(entry.nbytes)
        return Verdict.BAD, "its vault has found it damaged and does not use it"
    if entry.nbytes > segment.capacity(name):
        progress(entry.nbytes)
        return Verdict.BAD, f"{entry.nbytes} bytes in a part for {segment.capacity(name)}"
    digest, view = xxhash.xxh3_64(), segment.data(slot, name, entry.nbytes)
    for start in range(0, entry.nbytes, _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        digest.update(piece)
        progress(len(piece))
    found = digest.intdigest()
    if found == entry.checksum:
        return Verdict.GOOD, ""
    fence()  # a writer of these bytes has changed the header before: make that change visible
    is_kept = segment.state(slot) is SlotState.SEALED and segment.generation(slot) == generation
    if not is_kept or segment.entry(slot, name) != entry:
        return Verdict.BUSY, "was overwritten meanwhile"
    return Verdict.BAD, f"checksum {found:016x} instead of {entry.checksum:016x}"


class Meter:
    """Adds up progress and calls ``show(done_bytes)`` at most ten times a second."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self._show = show
        self._done = 0
        self._shown = 0.0

    def __call__(self, nbytes: int) -> None:
        """Add ``nbytes`` to the progress."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            self._show(self._done)
