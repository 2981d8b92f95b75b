"""How a vault asks another one for parts that it holds."""

from __future__ import annotations

from collections.abc import Sequence

from deadpool_megatron.layout.records import Generation, Source
from deadpool_megatron.vault.errors import MALFORMED, Refusal, Refused
from deadpool_megatron.vault.net.transport import Channel
from deadpool_megatron.wire.framing import WireError

# What comes of a vault that cannot be reached, or does not speak as it should.
UNREACHABLE = (OSError, WireError, *MALFORMED)


def ask(
    channel: Channel,
    node: int,
    epoch: int,
    source: Source,
    generation: Generation,
    parts: Sequence[str],
    *,
    protects: bool = False,
) -> list[tuple[int, int]]:
    """Returns size (bytes) and checksum of each part, whose bytes follow, one after the other.

    ``node``: who asks. ``protects``: not for a restore; the bytes come at the pace of what is sent
    to protect the role, those of each part after a ``next``, and after all of them an ``end``.

    Raises Refused; ConnectionError from one that has not adopted the epoch yet; what
    :meth:`Channel.receive` raises.
    """
    channel.send(
        {
            "t": "fetch",
            "epoch": epoch,
            "node": node,
            "role": source.role,
            "generation": generation.to_list(),
            "parts": list(parts),
            "protects": protects,
        }
    )
    answer = channel.receive()
    if refused := Refused.in_answer(answer):
        if refused.why is Refusal.EARLY:
            raise ConnectionError("has not adopted the epoch yet")
        raise refused
    found = [(int(nbytes), int(checksum)) for nbytes, checksum in answer["parts"]]
    if len(found) != len(parts):
        raise WireError(f"{len(found)} parts instead of {len(parts)}")
    return found


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
