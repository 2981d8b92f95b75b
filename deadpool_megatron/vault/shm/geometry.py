"""Where everything lies in a segment file, and what its description says.

File: words, the description (JSON: layout, seat, slots, page size), then the slots. Everything that
gets memory, or is locked in it, begins and ends with a page of the host that made the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from deadpool_megatron.layout.reckoning.footprint import PAGE_BYTES
from deadpool_megatron.layout.records import RoleLayout, Seat
from deadpool_megatron.vault.errors import DamagedSegment, SegmentError

MAGIC = 0x3230_4745_5350_4D44  # "DMPSEG02", little endian
FIRST_BYTES = 4096  # of the file, whatever a page is: the words below; then the description
W_MAGIC, W_FROZEN, W_LENGTH, W_CHECKSUM = range(4)
# Of a slot header, in words of 8 bytes.
ENTRIES = 8
ENTRY_WORDS = 4


class Geometry:
    """Derived from the description alone."""

    def __init__(
        self, layout: RoleLayout, seat: Seat | None, slots: int, page_bytes: int = PAGE_BYTES
    ) -> None:
        described = {
            "layout": layout.to_dict(),
            "seat": seat.to_list() if seat else None,
            "slots": slots,
            "page_bytes": page_bytes,
        }
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

    def is_laid_out_as(self, other: Geometry) -> bool:
        """Whether the same parts lie in the same places."""
        return (self.first, self.stride, self.offsets) == (other.first, other.stride, other.offsets)

    def pages(self, nbytes: int) -> int:
        """Bytes of the whole pages that so many bytes take."""
        return -(-nbytes // self.page_bytes) * self.page_bytes


def segment_bytes(layout: RoleLayout) -> int:
    """Memory of an own segment with all its slots, headers included."""
    return Geometry(layout, None, layout.slots).nbytes


def is_torn(path: Path) -> bool:
    """True for a file that no version has finished: the magic is written last, and never zero."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(8).ljust(8, b"\0"), "little") == 0


def read_description(file: int, path: Path, seat: Seat | None) -> tuple[RoleLayout, Geometry]:
    """What an open segment file says of itself. Raises SegmentError, DamagedSegment for one whose
    bytes are not those that were written."""
    words = memoryview(os.pread(file, FIRST_BYTES, 0).ljust(FIRST_BYTES, b"\0")).cast("Q")
    length = min(words[W_LENGTH], 64 << 20)
    text = os.pread(file, length, FIRST_BYTES)
    if words[W_MAGIC] != MAGIC:
        raise SegmentError(f"{path} is no segment of this version")
    if (digest := xxhash.xxh3_64_intdigest(text)) != words[W_CHECKSUM]:
        why = f"{path} is not a whole segment: its description is damaged"
        raise DamagedSegment(why, words[W_CHECKSUM], digest)
    try:
        described = json.loads(text)
        layout = RoleLayout.from_dict(described["layout"])
        pages = int(described["page_bytes"])
        return layout, Geometry(layout, seat, int(described["slots"]), pages)
    except (KeyError, TypeError, ValueError) as error:
        raise SegmentError(f"{path}: description not understood: {error}") from error
