"""What another vault may answer to who asks it for parts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deadpool_megatron.layout.records import Generation, Source
from deadpool_megatron.vault.core import fetch
from tests.vault.fake_network import FakeNetwork

ASKED = Source(1, 0), Generation(1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        {"t": "part", "nbytes": math.inf, "checksum": 1, "elsewhere": [["shard", 1, math.inf]]},
        {"t": "part", "nbytes": [1], "checksum": 1, "elsewhere": 7},
        {"t": "refused", "why": "the moon"},
        {"t": "part", "nbytes": 1},
        {},
    ],
)
def test_a_malformed_answer_is_as_good_as_none(answer: dict[str, Any]) -> None:
    """It ends no vault: who asked goes on to the next place."""
    network = FakeNetwork()
    here, there = network.transport("a", 1, 5.0), network.transport("b", 1, 5.0)
    channel = here.connect(1, "b", 1)
    peer = there.await_one()
    for _ in range(2):
        peer.send(answer)
    with pytest.raises(fetch.UNREACHABLE):
        fetch.ask(channel, 1, *ASKED, "shard")
    with pytest.raises(fetch.UNREACHABLE):
        fetch.ask_elsewhere(channel, *ASKED)
    channel.close()
    peer.close()
