"""The vault behind its Transport seam, in this process: a cut network, and the accept side."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron.layout.records import EpochRecord, Generation, NodeAddress, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.member.client import VaultClient
from deadpool_megatron.vault.service import Vault
from tests.vault.fake_network import FakeNetwork, QuickListener
from tests.vault.harness import make_layout

SETTINGS = Settings(connect_seconds=5.0)
G = Generation(1, 0)


class FakeNode:
    """A vault on the fake network and one member's client."""

    def __init__(self, network: FakeNetwork, number: int, directory: Path) -> None:
        directory.mkdir(parents=True)
        path = str(directory / "vault.sock")
        listener = QuickListener(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen()
        transport = network.transport("fake", number, deadline_seconds=5.0)
        self.vault = Vault(number, directory, SETTINGS, transport, listener)
        self.vault.start()
        self.client = VaultClient(path, directory, Seat(number, 0, 0), connect_seconds=5.0)
        self.listener = listener
        self.end = threading.Thread(target=self.vault.wait)
        self.end.start()

    def stop(self) -> None:
        self.client.close()
        self.vault.stop(remove=True)
        self.end.join(10)
        self.listener.close()


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def nodes(network: FakeNetwork, tmp_path: Path) -> Iterator[list[FakeNode]]:
    running = [FakeNode(network, n, tmp_path / "deadpool-x" / f"node{n}") for n in range(2)]
    yield running
    for node in running:
        node.stop()
    assert list(tmp_path.iterdir()) == []


def record(epoch: int, restore: Restore) -> EpochRecord:
    return EpochRecord(
        epoch=epoch,
        seats={role: Seat(role, 0, 0) for role in range(2)},
        nodes={n: NodeAddress("fake", n, f"rack{n}") for n in range(2)},
        restore=restore,
    )


def gate(node: FakeNode, seconds: float) -> str:
    """``shut`` when the gate did not open in time."""

    class ShutError(Exception):
        pass

    def report(waited: float) -> None:
        if waited >= seconds:
            raise ShutError

    reader, writer = socket.socketpair()
    try:
        return node.client.wait_committed(
            G,
            "step",
            deadline_seconds=seconds,
            interrupted=reader.fileno(),
            on_wait=report,
            report_every_seconds=0.1,
        )
    except ShutError:
        return "shut"
    finally:
        reader.close()
        writer.close()


def test_a_cut_network_heals(network: FakeNetwork, nodes: list[FakeNode]) -> None:
    for node in nodes:
        node.vault.adopt(record(1, Restore("initial", G)))
    network.cut.add(("fake", 1))
    layout = make_layout(0)
    nodes[0].client.register(layout, 1)
    nodes[0].client.begin(G, 1).fill({"shard": 10, "tail": 10, "extras@step": 10})
    assert gate(nodes[0], 0.3) == "shut"
    assert [h["role"] for h in nodes[0].vault.status()["holdings"]] == [0]
    network.cut.clear()
    assert gate(nodes[0], 10) == "committed"
    assert [h["role"] for h in nodes[1].vault.status()["holdings"]] == [0]


def test_a_buddy_that_has_not_heard_of_the_epoch_yet(nodes: list[FakeNode]) -> None:
    """Early is no offence: the put waits for the record to arrive there."""
    nodes[0].vault.adopt(record(1, Restore("initial", G)))
    nodes[0].client.register(make_layout(0), 1)
    nodes[0].client.begin(G, 1).fill({"shard": 10, "tail": 10, "extras@step": 10})
    assert gate(nodes[0], 0.3) == "shut"
    nodes[1].vault.adopt(record(1, Restore("initial", G)))
    assert gate(nodes[0], 10) == "committed"
    assert not any("refused" in name for name in nodes[1].vault.status()["counters"])
