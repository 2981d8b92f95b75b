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
from deadpool_megatron.vault.transport import Channel, FakeNetwork, FakeTransport
from tests.vault.harness import make_layout, wait_until

LAYOUT = make_layout(0, nbytes=100)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "relay-0-to-2"]


def opened(directory: Path) -> VaultState:
    """The vault of node 1, which hands copies of role 0 on to node 2, in epoch 1."""
    state = VaultState(1, directory, Settings(), lambda _: None)
    state.adopt(
        EpochRecord(
            epoch=1,
            seats={0: Seat(0, 0, 0)},
            nodes={n: NodeAddress("fake", n, f"rack{n}", n > 0) for n in range(3)},
            restore=Restore("initial", Generation(1, 0)),
            replicas=2,
        )
    )
    return state


class Silent(FakeTransport):
    """Nobody answers at any address, until the test lets the attempt end."""

    def __init__(self) -> None:
        super().__init__(FakeNetwork(), ("fake", 1), 5.0)
        self.dialled, self.over = threading.Event(), threading.Event()

    def connect(self, host: str, port: int) -> Channel:
        self.dialled.set()
        assert self.over.wait(20.0)
        raise TimeoutError("timed out")


def test_an_address_that_nobody_answers_at_keeps_no_slot_behind_the_put(tmp_path: Path) -> None:
    """When the owner has gone, or the epoch was closed, the slot is for the next generation."""
    state, transport = opened(tmp_path), Silent()
    segment = Segment.create(tmp_path / copy_name(0), LAYOUT, None, ["shard"])
    relay = Relay(state, transport)
    relay.start({"t": "put", "epoch": 1}, [2], segment, 0, [("shard", 0, 0)])
    assert transport.dialled.wait(5.0)
    assert state.table.pins[segment.path.name, 0] == 1
    (thread,) = threads()
    relay.close()
    assert not any(state.table.pins.values()), "although the attempt goes on"
    assert thread.is_alive()
    transport.over.set()
    thread.join(5.0)
    assert not thread.is_alive()
    assert not any(state.table.pins.values())


def test_the_end_of_one_put_leaves_the_thread_of_the_next_its_connection(tmp_path: Path) -> None:
    """The owner hears of the last node before the thread has quite ended, and goes on at once."""
    network = FakeNetwork()
    following = network.transport("fake", 2, 5.0)
    state = opened(tmp_path)
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
