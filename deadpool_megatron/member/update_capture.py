"""The seam for schemes that keep something of each update beside the state that it made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from deadpool_megatron.layout.records import Generation, PartInfo
from deadpool_megatron.platform import devices
from deadpool_megatron.state.parts import Part
from deadpool_megatron.vault.member import RestoredParts, SlotWriter

# Of what is waited for, in words, and what waits for so many seconds at most.
Await = Callable[[str, Callable[[float], bool]], None]


class ReplayRefused(RuntimeError):
    """Every byte was intact, and the result is not what the owner had; one line for people."""


class LiveState(Protocol):
    """The live tensors of a role, into which restored bytes go (:mod:`.protection`)."""

    def load(self, restored: Iterable[tuple[Part, memoryview]]) -> None:
        """Bring restored bytes into live tensors."""

    def seal_replayed(self, generation: Generation, sums: Mapping[str, tuple[int, int]]) -> str:
        """Hand over the restored ``generation``, whose parts in ``sums`` have been recomputed;
        returns the first part that has other bytes."""


class UpdateCapture:
    """The part that a scheme keeps of each update beside the state that it made. Main thread.

    Here nothing: schemes with whole copies of the state need no more.
    """

    gradients: Sequence[Part] = ()

    def layout_parts(self, role: int) -> Sequence[PartInfo]:
        """The parts that a slot needs for it."""
        return ()

    def begin(self, *, wanted: bool) -> None:
        """A new epoch, whose plan wants it or does not."""

    def capture(self, index: int, writer: SlotWriter) -> None:
        """Inner optimizer ``index`` is about to update: start copying what it will use."""

    def order_copies(self, await_it: Await) -> None:
        """Before the next iteration may overwrite gradients. On a device nobody waits here but its
        stream."""

    def finish(
        self,
        writer: SlotWriter,
        generation: Generation,
        previous: Generation | None,
        shard_copies: list[devices.CopyHandle],
        await_it: Await,
    ) -> tuple[dict[str, int], list[devices.CopyHandle]]:
        """The iteration is over: part -> bytes of it in its slot, and copies under way."""
        return {}, []

    def running(self) -> list[devices.CopyHandle]:
        """Copies of an interrupted update; forgotten hereby."""
        return []

    def recompute(
        self,
        missing: Sequence[Part],
        restored: RestoredParts,
        generation: Generation,
        live: LiveState,
    ) -> Mapping[str, Any]:
        """Bring ``missing`` parts, which nobody holds whole, into the live tensors; returns what is
        to be reported of it. Raises ReplayRefused, and what waits of the protection raise."""
        raise ReplayRefused(f"{missing[0].name} of {generation} is not complete anywhere")
