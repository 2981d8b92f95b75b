"""A slot of a real segment in /dev/shm, page-locked where there is a GPU."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_EXTRAS_BYTES = 4096
_COPY_SECONDS = 30.0


class Slot:
    """A slot that holds tensors, as it holds a member's shard."""

    def __init__(self, tensors: list[Any], directory: str) -> None:
        from deadpool_megatron.layout.records import Generation, Seat
        from deadpool_megatron.member.role_layout import role_layout
        from deadpool_megatron.platform import select_platform
        from deadpool_megatron.state.parts import Part
        from deadpool_megatron.vault.shm.segment import Segment, checksum, own_name

        self._generation, self._checksum = Generation(1, 1), checksum
        self.platform, self._part = select_platform(), Part("shard", tensors, (0,))
        layout = role_layout(0, [self._part], _EXTRAS_BYTES, [0], 2, "proof")
        path = Path(directory) / own_name(0, seat := Seat(0, 0, 0))
        self._segment = Segment.create(path, layout, seat, (self._part.name,), slots=1)
        self.bytes = self._segment.data(0, self._part.name, self._part.nbytes)
        self._views = self._part.views(self.bytes)

    def start_copy(self) -> Any:
        """Start a copy of the tensors into the slot, concurrent with the device's work."""
        return self.platform.side_copy(self._views, self._part.tensors)

    def capture(self) -> None:
        """Copy the tensors into the slot and seal it."""
        self._segment.open_slot(0, self._generation, 1)
        assert self.start_copy().wait(_COPY_SECONDS), "the copy into the slot has not ended"
        name, nbytes = self._part.name, self._part.nbytes
        self._segment.seal_part(0, name, nbytes, self._checksum(self.bytes), 1)

    def put_back(self) -> None:
        """Copy the slot into the tensors, if it has the bytes that were sealed."""
        assert self._checksum(self.bytes) == self._segment.entry(0, self._part.name).checksum
        copy = self.platform.side_copy(self._part.tensors, self._views)
        assert copy.wait(_COPY_SECONDS), "the copy out of the slot has not ended"


@contextlib.contextmanager
def slot_of(tensors: list[Any]) -> Iterator[tuple[Slot, float]]:
    """Yield the slot, and the seconds that its page-locking took."""
    with tempfile.TemporaryDirectory(prefix="deadpool-proof-", dir="/dev/shm") as directory:
        slot = Slot(tensors, directory)
        is_pinned = slot.platform.is_cuda
        began = time.monotonic()
        if is_pinned:
            slot.platform.register_host_memory(slot.bytes)
        try:
            yield slot, time.monotonic() - began
        finally:
            if is_pinned:
                slot.platform.unregister_host_memory(slot.bytes)
