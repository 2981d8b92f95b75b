"""The slots that a process writes: memory for them, page-locked for the device, seen as tensors.

Page-locked, so that copies into and out of them run beside training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from torch import Tensor

from deadpool_megatron.platform.base import Platform, host_range
from deadpool_megatron.state.packing import Part
from deadpool_megatron.vault.member.client import SlotWriter


class PinnedSlots:
    """The memory of slots that is registered with the driver, of one process.

    A process that waits for a role registers the slots that it has parked. Others are registered
    when they are first written, in the first iterations of a process in its role, which are slow
    anyway. Does nothing where there is no device. A driver that refuses (a limit on locked memory,
    pages that two parts share) costs speed and nothing else. Main thread only.
    """

    def __init__(self, platform: Platform, warn: Callable[[str], None]) -> None:
        """``warn``: gets one line, the first time that the driver refuses."""
        self._platform = platform
        self._warn = warn
        self._is_refused = False
        # By address. The views keep the mapping: no other memory can get its address.
        self._views: dict[int, memoryview] = {}

    def pin(self, views: Iterable[memoryview]) -> None:
        """Register memory of slots, once; not after the driver has refused."""
        if not self._platform.is_cuda or self._is_refused:
            return
        for view in views:
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

    def keep_only(self, views: Iterable[memoryview]) -> None:
        """Undo it for all other memory: slots that are not those of this process any more."""
        if not self._views:
            return
        kept = {host_range(view)[0] for view in views}
        for address in self._views.keys() - kept:
            self._release(self._views.pop(address))

    def release(self) -> None:
        """Undo it all; the slots are about to be unmapped."""
        while self._views:
            self._release(self._views.popitem()[1])

    def _release(self, view: memoryview) -> None:
        # A device in error refuses; its process is about to end.
        with contextlib.suppress(RuntimeError):
            self._platform.unregister_host_memory(view)


class SlotViews:
    """Tensors over the parts of slots, made once for each slot: a part may have thousands.

    Of one process, whose slots stay where they are as long as it plays its role.
    """

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
