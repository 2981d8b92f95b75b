"""Taking the parts of a put from a channel straight into their slot, and sealing each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.vault.segment import Segment
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.transport import Channel
from deadpool_megatron.wire.framing import ConnectionClosed, WireError

if TYPE_CHECKING:
    from deadpool_megatron.vault.halves import HalvesTaker, Waiting

# Name, bytes, checksum.
Offered = tuple[str, int, int]


class Intake:
    """Of one connection and its one thread; ``arrived(name, bytes so far)`` hears of each chunk."""

    def __init__(
        self, state: VaultState, channel: Channel, arrived: Callable[[str, int], None]
    ) -> None:
        self._state = state
        self._channel = channel
        self._arrived = arrived
        self._halves: HalvesTaker | None = None

    def learn(self, layout: RoleLayout | None, lists: Mapping[str, Any]) -> None:
        """Where the masters lie in the parts of the role that is offered on this connection."""
        # It loads numpy, and only then.
        from deadpool_megatron.vault.halves import HalvesTaker

        if layout is None:
            raise WireError("masters of an unknown layout")
        self._halves = HalvesTaker(self._state, layout, lists)

    def choose(self, epoch: int, offered: Iterable[str], needed: Sequence[Offered]) -> list[str]:
        """Which parts shall come without what this node can add: see :mod:`.halves`."""
        if self._halves is None:
            return []
        return self._halves.choose(epoch, offered, {name: size for name, size, _ in needed})

    def take(
        self,
        segment: Segment,
        slot: int,
        needed: Sequence[Offered],
        halves: Sequence[str],
        epoch: int,
    ) -> dict[str, str]:
        """Take and seal parts. Answers those that are not sealed: why the halves of one could not
        be put together, empty for damaged bytes. Raises ConnectionClosed at a close.
        """
        failed: dict[str, str] = {}
        started = time.monotonic()
        waiting: list[tuple[Waiting, int]] = []
        for name, size, digest in needed:
            if not self._state.open_part(segment, slot, name, epoch):
                raise ConnectionClosed("the epoch was closed")
            if self._halves is not None and name in halves:
                taken = self._halves.receive(self._channel, segment, slot, name, size)
                waiting.append((taken, digest))
            elif self._is_whole(segment, slot, name, size, digest):
                self._seal(segment, slot, name, size, digest, epoch)
            else:
                failed[name] = ""
        for taken, digest in waiting:
            assert self._halves is not None
            if why := self._halves.finish(taken, digest, epoch, time.monotonic() - started):
                if not self._state.is_open(epoch):
                    raise ConnectionClosed("the epoch was closed")
                self._state.counters[f"halves: {why}"] += 1
                failed[taken.name] = why
            else:
                self._seal(segment, slot, taken.name, taken.nbytes, digest, epoch)
        return failed

    def _is_whole(self, segment: Segment, slot: int, name: str, nbytes: int, expected: int) -> bool:
        """Take the bytes of one part; False when they are damaged."""
        state = self._state
        found = receive_part(
            *(self._channel, segment, slot, name, nbytes, state.settings.chunk_bytes),
            arrived=self._arrived,
        )
        if found != expected:
            generation = segment.generation(slot)
            state.counters["corruption"] += 1
            state.emit_corruption(segment.layout.role, generation, name, "wire", expected, found)
            return False
        state.counters["bytes received"] += nbytes
        return True

    def _seal(
        self, segment: Segment, slot: int, name: str, nbytes: int, digest: int, epoch: int
    ) -> None:
        state = self._state
        if not state.seal_copy(segment, slot, name, nbytes, digest, epoch):
            state.refuse("stale", role=segment.layout.role, epoch=epoch)
            raise ConnectionClosed("the epoch was closed")
        state.fail_point_corrupt("vault.received", segment, slot, [name])


def receive_part(
    channel: Channel,
    segment: Segment,
    slot: int,
    name: str,
    nbytes: int,
    chunk_bytes: int,
    arrived: Callable[[str, int], None] = lambda *_: None,
) -> int:
    """Receive a part's bytes straight into its slot; answers their checksum.

    ``arrived(name, bytes so far)`` is called after each chunk.
    """
    view = segment.data(slot, name, nbytes)
    digest = xxhash.xxh3_64()
    for start in range(0, nbytes, chunk_bytes):
        chunk = view[start : start + chunk_bytes]
        channel.receive_bulk(chunk)
        arrived(name, start + len(chunk))
        digest.update(chunk)
    return digest.intdigest()
