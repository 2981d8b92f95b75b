"""Tensors over the parts of slots, made once for each slot: a part may have thousands."""

from __future__ import annotations

from torch import Tensor

from deadpool_megatron.platform.base import host_range
from deadpool_megatron.state.packing import Part
from deadpool_megatron.vault.member.client import SlotWriter


class SlotViews:
    """Of one process, whose slots stay where they are as long as it plays its role."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[Tensor]] = {}

    def of(self, part: Part, writer: SlotWriter) -> list[Tensor]:
        """Returns CPU tensors over the part in the slot that is written, one per live tensor."""
        buffer = writer.part(part.name)
        if not part.nbytes:  # memory without bytes has no address
            return part.views(buffer)
        place = part.name, host_range(buffer)[0]
        if place not in self._known:
            self._known[place] = part.views(buffer)
        return self._known[place]
