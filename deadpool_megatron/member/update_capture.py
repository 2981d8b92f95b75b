"""The seam for schemes that keep data of each update in addition to the new state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from deadpool_megatron.layout.records import Generation, PartInfo
from deadpool_megatron.platform import devices
from deadpool_megatron.state.parts import Part
from deadpool_megatron.vault.vault_client import RestoredParts, SlotWriter

# Arguments: the name of an operation, and a function that waits for it: seconds -> done.
Await = Callable[[str, Callable[[float], bool]], None]


class ReplayRefused(RuntimeError):
    """All bytes were intact, but the result differs from the owner's; the message is one line."""


class LiveState(Protocol):
    """The live tensors of a role, into which restored bytes are loaded (:mod:`.protection`)."""

    def load(self, restored: Iterable[tuple[Part, memoryview]]) -> None:
        """Copy restored bytes into live tensors."""

    def seal_replayed(self, generation: Generation, sums: Mapping[str, tuple[int, int]]) -> str:
        """Hand over the restored ``generation``, whose parts in ``sums`` have been recomputed;
        return the first part that differs."""


class UpdateCapture:
    """Data that a scheme keeps of each update in addition to the new state. Main thread.

    This class keeps none: schemes with whole copies of the state need no more.
    """

    gradients: Sequence[Part] = ()

    def layout_parts(self, rank: int) -> Sequence[PartInfo]:
        """Return the parts that a slot needs for this data."""
        return ()

    def begin(self, *, wanted: bool) -> None:
        """Begin an epoch; ``wanted``: its plan has this data kept."""

    def capture(self, index: int, writer: SlotWriter) -> None:
        """Start copying the input of the update that inner optimizer ``index`` is about to make."""

    def order_copies(self, await_it: Await) -> None:
        """Order the copies before the next iteration overwrites gradients. On a device only the
        stream waits, not the host."""

    def finish(
        self,
        writer: SlotWriter,
        generation: Generation,
        previous: Generation | None,
        shard_copies: list[devices.CopyHandle],
        await_it: Await,
    ) -> tuple[dict[str, int], list[devices.CopyHandle]]:
        """End the iteration; return part -> bytes in its slot, and the copies under way."""
        return {}, []

    def running(self) -> list[devices.CopyHandle]:
        """Return the copies of an interrupted update, and forget them."""
        return []

    def recompute(
        self,
        missing: Sequence[Part],
        restored: RestoredParts,
        generation: Generation,
        live: LiveState,
    ) -> Mapping[str, Any]:
        """Compute ``missing`` parts, which no node holds whole, in the live tensors. Returns facts
        to report. Raises ReplayRefused, and as the waits of the protection do."""
        raise ReplayRefused(f"{missing[0].name} of {generation} is not complete anywhere")
