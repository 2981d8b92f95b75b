"""Asking other vaults for parts that they hold, and taking bytes straight into their slot."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from deadpool_megatron.layout.records import Generation, Source
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import MALFORMED, Refusal, Refused
from deadpool_megatron.vault.net.transport import Channel
from deadpool_megatron.vault.shm.segment import Segment
from deadpool_megatron.wire.framing import ConnectionClosed, WireError

# What comes of a vault that cannot be reached, or does not speak as it should.
UNREACHABLE = (OSError, WireError, *MALFORMED)


def ask(
    channel: Channel, epoch: int, source: Source, generation: Generation, part: str
) -> tuple[int, int]:
    """Returns size (bytes) and checksum of a part, whose bytes follow.

    Raises Refused; ConnectionError from one that has not adopted the epoch yet; what
    :meth:`Channel.receive` raises.
    """
    about = {"role": source.role, "generation": generation.to_list(), "part": part}
    channel.send({"t": "fetch", "epoch": epoch, **about})
    answer = channel.receive()
    if refused := Refused.in_answer(answer):
        if refused.why is Refusal.EARLY:
            raise ConnectionError("has not adopted the epoch yet")
        raise refused
    return int(answer["nbytes"]), int(answer["checksum"])


def ask_elsewhere(
    channel: Channel, source: Source, generation: Generation
) -> dict[str, tuple[int, int]]:
    """Returns size (bytes) and checksum, as the owner had them, of the parts of a generation that
    a copy lacks because peers of the role hold the same bytes.

    Raises what :meth:`Channel.receive` raises.
    """
    channel.send({"t": "describe", "role": source.role, "generation": generation.to_list()})
    found = channel.receive()["elsewhere"]
    return {str(name): (int(nbytes), int(checksum)) for name, nbytes, checksum in found}


# Name, bytes, checksum.
Offered = tuple[str, int, int]


class Intake:
    """Of one connection and its one thread."""

    def __init__(self, state: VaultState, channel: Channel) -> None:
        self._state = state
        self._channel = channel

    def take(self, segment: Segment, slot: int, needed: Sequence[Offered], epoch: int) -> list[str]:
        """Take parts; returns the names of those sealed, which damaged ones are not. Raises
        ConnectionClosed at a close.
        """
        taken: list[str] = []
        for name, size, digest in needed:
            if not self._state.open_part(segment, slot, name, epoch):
                raise ConnectionClosed("the epoch was closed")
            if self._is_whole(segment, slot, name, size, digest):
                self._seal(segment, slot, name, size, digest, epoch)
                taken.append(name)
        return taken

    def _is_whole(self, segment: Segment, slot: int, name: str, nbytes: int, expected: int) -> bool:
        """Take the bytes of one part; False when they are damaged."""
        state = self._state
        found = receive_part(self._channel, segment, slot, name, nbytes)
        if found != expected:
            generation = segment.generation(slot)
            state.reports.counters["corruption"] += 1
            state.reports.corruption(segment.layout.role, generation, name, "wire", expected, found)
            return False
        state.reports.counters["bytes received"] += nbytes
        return True

    def _seal(
        self, segment: Segment, slot: int, name: str, nbytes: int, digest: int, epoch: int
    ) -> None:
        state = self._state
        if not state.seal_copy(segment, slot, name, nbytes, digest, epoch):
            state.reports.refuse(Refusal.STALE, role=segment.layout.role, epoch=epoch)
            raise ConnectionClosed("the epoch was closed")
        state.fail_point_corrupt("vault.received", segment, slot, [name])


def receive_part(channel: Channel, segment: Segment, slot: int, name: str, nbytes: int) -> int:
    """Receive a part's bytes straight into its slot; returns their checksum."""
    digest = xxhash.xxh3_64()
    channel.receive_bulk(segment.data(slot, name, nbytes), digest.update)
    return digest.intdigest()
