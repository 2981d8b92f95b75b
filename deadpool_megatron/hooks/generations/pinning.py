"""Slots page-locked for the device, so that copies into them run beside training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from deadpool_megatron.platform.base import Platform, host_range
from deadpool_megatron.vault.member.client import SlotWriter


class PinnedSlots:
    """Registers the shard parts of each slot with the driver when the slot is first written.

    That is in the first iterations of a process in its role, which are slow anyway. Does nothing
    where there is no device. A driver that refuses (a limit on locked memory, pages that two parts
    share) costs speed and nothing else. Main thread only.
    """

    def __init__(
        self, platform: Platform, names: Sequence[str], warn: Callable[[str], None]
    ) -> None:
        """``warn``: gets one line, the first time that the driver refuses."""
        self._platform = platform
        self._names = names
        self._warn = warn
        self._is_refused = False
        # By address. The views keep the mapping: no other memory can get its address.
        self._views: dict[int, memoryview] = {}

    def pin(self, writer: SlotWriter) -> None:
        """Register the memory of a slot, once; not after the driver has refused."""
        if not self._platform.is_cuda or self._is_refused:
            return
        for name in self._names:
            view = writer.part(name)
            address, _ = host_range(view)
            if address in self._views:
                continue
            try:
                self._platform.register_host_memory(view)
            except RuntimeError as error:
                self._is_refused = True
                why = str(error).partition("\n")[0]
                self._warn(
                    f"the driver does not lock {len(view)} bytes of a slot ({why}): copies from the"
                    " device wait for the host; raise the limit on locked memory (ulimit -l)"
                )
                return
            self._views[address] = view

    def release(self) -> None:
        """Undo it all; the slots are about to be unmapped."""
        while self._views:
            _, view = self._views.popitem()
            # A device in error refuses; its process is about to end.
            with contextlib.suppress(RuntimeError):
                self._platform.unregister_host_memory(view)
