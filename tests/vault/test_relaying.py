"""Two puts of one connection in quick succession, handed on."""

from __future__ import annotations

import threading
from pathlib import Path

from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    NodeAddress,
    Restore,
    Seat,
)
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.relaying import Relay
from deadpool_megatron.vault.segment import Segment, copy_name
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.transport import FakeNetwork
from tests.vault.harness import make_layout, wait_until

LAYOUT = make_layout(0, nbytes=100)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "relay-0-to-2"]


def test_the_end_of_one_put_leaves_the_thread_of_the_next_its_connection(tmp_path: Path) -> None:
    """The owner hears of the last node before the thread has quite ended, and goes on at once."""
    network = FakeNetwork()
    following = network.transport("fake", 2, 5.0)
    state = VaultState(1, tmp_path, Settings(), lambda _: None)
    state.adopt(
        EpochRecord(
            epoch=1,
            seats={0: Seat(0, 0, 0)},
            nodes={n: NodeAddress("fake", n, f"rack{n}", n > 0) for n in range(3)},
            restore=Restore("initial", Generation(1, 0)),
            store_host="",
            store_port=0,
            replicas=2,
        )
    )
    segment = Segment.create(tmp_path / copy_name(0), LAYOUT, None, ["shard"])
    relay = Relay(state, network.transport("fake", 1, 5.0))
    put, parts = {"t": "put", "epoch": 1}, [("shard", 0, 0)]

    def take() -> None:
        assert channel is not None
        assert channel.receive() == {**put, "chain": []}
        channel.send({"t": "need", "parts": []})
        channel.send({"t": "sealed", "parts": ["shard"]})
        assert relay.answer(5.0) == {"t": "link", "node": 2, "parts": ["shard"], "why": ""}

    relay.start(put, [2], segment, 0, parts)
    channel = following.accept(5.0)
    assert channel is not None
    assert channel.receive()["t"] == "offer"
    take()
    wait_until(lambda: not threads(), "that was the first put, which connects")
    with state.lock:  # the thread of the second has answered and cannot end
        relay.start(put, [2], segment, 0, parts)
        take()
        (first,) = threads()
        relay.start(put, [2], segment, 0, parts)
        assert channel.receive()["t"] == "put"
    first.join(5.0)
    assert not first.is_alive()
    (second,) = threads()
    assert relay._running is second, "it alone may close"
    relay.close()
    assert relay.answer(5.0) is not None
    wait_until(lambda: not second.is_alive(), "the second put is given up")
    assert not any(state.table.pins.values())
    assert relay._next is None
    channel.close()
