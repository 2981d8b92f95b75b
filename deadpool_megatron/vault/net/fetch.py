"""How a vault asks another one for a part that it holds."""

from __future__ import annotations

from deadpool_megatron.layout.records import Generation, Source
from deadpool_megatron.vault.errors import Refusal, Refused
from deadpool_megatron.vault.net.transport import Channel


def ask(
    channel: Channel, node: int, epoch: int, source: Source, generation: Generation, part: str
) -> tuple[int, int]:
    """Returns size (bytes) and checksum of the part, whose bytes follow. ``node``: who asks.

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
            "part": part,
        }
    )
    answer = channel.receive()
    if refused := Refused.in_answer(answer):
        if refused.why is Refusal.EARLY:
            raise ConnectionError("has not adopted the epoch yet")
        raise refused
    return int(answer["nbytes"]), int(answer["checksum"])
