"""Shared memory that a member holds: a slot it writes, and parts it restores from."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState

# Sends a message to the vault if it is there.
Tell = Callable[[Mapping[str, Any]], None]


class SlotWriter:
    """One slot that is being written; from ``VaultClient.begin``.

    May be handed to another thread. Once its epoch was closed this writer is left over, and changes
    nothing of a slot that was begun for another generation.
    """

    def __init__(
        self, tell: Tell, segment: Segment, slot: int, generation: Generation, epoch: int
    ) -> None:
        self.generation = generation
        self._tell = tell
        self._segment = segment
        self._slot = slot
        self._epoch = epoch
        self._freezes = segment.freezes()

    def part(self, name: str) -> memoryview:
        """Writable bytes of a part, its full capacity; uninitialised."""
        return self._segment.data(self._slot, name)

    def fill(self, parts: Mapping[str, int]) -> None:
        """Declare these parts complete (name -> bytes used) and have the vault seal them.

        Raises VaultError when the slot is another's though the epoch was not closed: nobody would
        ever seal them, and the gate would wait in vain.
        """
        for name, nbytes in parts.items():
            if not 0 <= nbytes <= self._segment.capacity(name):
                raise VaultError(
                    f"part {name} has {nbytes} bytes, more than its {self._segment.capacity(name)}"
                )
        if self._is_mine():
            self._declare(parts)
            self._tell({"t": "filled"})
        elif self._segment.freezes() == self._freezes:  # looked at last: a close freezes first
            raise VaultError(f"slot {self._slot} is not that of {self.generation} any more")

    def abandon(self) -> None:
        """Give the slot back; its bytes count for nothing."""
        if self._is_mine():
            self._segment.set_state(self._slot, SlotState.EMPTY)

    def _declare(self, parts: Mapping[str, int]) -> None:
        self._segment.fill(self._slot, parts, self._epoch)

    def _is_mine(self) -> bool:
        segment, slot = self._segment, self._slot
        begun = segment.generation(slot), segment.epoch(slot)
        return segment.state(slot) is SlotState.WRITING and begun == (self.generation, self._epoch)


class PartsWriter(SlotWriter):
    """Parts that were lost of a generation, in the slot that holds the rest of it.

    No other slot is taken for them: older generations may be asked for until this one is committed
    again. The parts do not count while they are written, nor does the slot change otherwise.
    """

    def part(self, name: str) -> memoryview:
        """As ever; what it held until now was found to be damaged and does not count any more."""
        self._segment.invalidate_part(self._slot, name, PartState.ABSENT)
        return super().part(name)

    def abandon(self) -> None:
        """The parts stay lost."""

    def _declare(self, parts: Mapping[str, int]) -> None:
        for name, nbytes in parts.items():
            self._segment.fill_part(self._slot, name, nbytes, self._epoch)

    def _is_mine(self) -> bool:
        segment, slot = self._segment, self._slot
        is_sealed = segment.state(slot) is SlotState.SEALED
        return is_sealed and segment.generation(slot) == self.generation


class RestoredParts:
    """Checked bytes of one generation, read-only; kept by the vault until closed.

    Those in the member's ``own`` slots are seen where it has them mapped, and a device knows them.
    """

    def __init__(
        self,
        tell: Tell,
        directory: Path,
        parts: Mapping[str, tuple[str, int, int]],
        own: Segment | None = None,
    ) -> None:
        self._tell = tell
        self._maps: dict[str, memoryview] = {}
        self._parts: dict[str, memoryview] = {}
        for name, (file_name, offset, nbytes) in parts.items():
            if file_name not in self._maps:
                self._maps[file_name] = _mapped(directory / file_name, own)
            self._parts[name] = self._maps[file_name][offset : offset + nbytes]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts."""
        return tuple(self._parts)

    def part(self, name: str) -> memoryview:
        """Read-only bytes, exactly as many as were filled. Raises KeyError for an unknown part."""
        return self._parts[name]

    def close(self) -> None:
        """Let the vault reuse the slots. Views handed out still show whatever is there."""
        self._parts.clear()
        self._maps.clear()
        self._tell({"t": "release"})


def _mapped(path: Path, own: Segment | None) -> memoryview:
    if own is not None and own.maps(path):
        return own.contents.toreadonly()
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
