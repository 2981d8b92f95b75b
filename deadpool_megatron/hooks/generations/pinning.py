"""Slots page-locked for the device, so that copies into them run beside training."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from deadpool_megatron.platform.base import Platform, host_range
from deadpool_megatron.vault.member.client import SlotWriter


class PinnedSlots:
    """Registers the shard parts of each slot with the driver when the slot is first written.

    That is in the first iterations of a process in its role, which are slow anyway. Does nothing
    where there is no device. Main thread only.
    """

    def __init__(self, platform: Platform, names: Sequence[str]) -> None:
        self._platform = platform
        self._names = names
        # By address. The views keep the mapping: no other memory can get its address.
        self._views: dict[int, memoryview] = {}

    def pin(self, writer: SlotWriter) -> None:
        """Register the memory of a slot, once. Raises RuntimeError when the driver refuses."""
        if not self._platform.is_cuda:
            return
        for name in self._names:
            view = writer.part(name)
            address, _ = host_range(view)
            if address not in self._views:
                self._platform.register_host_memory(view)
                self._views[address] = view

    def release(self) -> None:
        """Undo it all; the slots are about to be unmapped."""
        while self._views:
            _, view = self._views.popitem()
            # A device in error refuses; its process is about to end.
            with contextlib.suppress(RuntimeError):
                self._platform.unregister_host_memory(view)
