"""Asking other vaults for parts that they hold, and taking bytes straight into their slot."""

from __future__ import annotations

import xxhash

from deadpool_megatron.layout.records import Generation, Source
from deadpool_megatron.vault.errors import MALFORMED, Refusal, Refused
from deadpool_megatron.vault.net.transport import Channel
from deadpool_megatron.vault.shm.segment import Segment
from deadpool_megatron.wire.framing import WireError

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


def receive_part(channel: Channel, segment: Segment, slot: int, name: str, nbytes: int) -> int:
    """Receive a part's bytes straight into its slot; returns their checksum."""
    digest = xxhash.xxh3_64()
    channel.receive_bulk(segment.data(slot, name, nbytes), digest.update)
    return digest.intdigest()
