"""Several buddies of a role: each has its copy from the owner. Vaults in this process."""

import threading
from functools import partial
from pathlib import Path

import pytest

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import Member, content, make_layout, record_of, wait_until
from tests.vault.local_node import LocalNode

SETTINGS = Settings(connect_seconds=5.0, chunk_bytes=4096)
LAYOUT = make_layout(0, nbytes=256 << 10)
BYTES = (256 << 10) + 1000 + 777


class Nodes:
    """Vaults 0..n-1 on a fake network; the member of role 0 on node 0, all others are buddies."""

    def __init__(self, directory: Path, count: int) -> None:
        self.network = FakeNetwork()
        self.nodes: list[LocalNode] = []
        for number in range(count):
            place = directory / "deadpool-copies" / f"node{number}"
            self.nodes.append(LocalNode(self.network, number, place, SETTINGS))
        self.vaults = [node.vault for node in self.nodes]
        self.member = Member(self.nodes[0], LAYOUT)

    def adopt(self, *numbers: int) -> None:
        count = len(self.vaults)
        for number in numbers or range(count):
            self.vaults[number].adopt(record_of(count=count, replicas=count - 1))

    def counter(self, number: int, name: str) -> int:
        counters = self.vaults[number].status()["counters"]
        return int(counters.get(name, 0))

    def has_received(self, number: int, nbytes: int) -> bool:
        """Whether a node has so many bytes of copies."""
        return self.counter(number, "bytes received") >= nbytes

    def check(self, iteration: int) -> None:
        """Every buddy holds every byte of the generation."""
        generation = Generation(1, iteration)
        for vault in self.vaults[1:]:
            for name, nbytes in (("shard", 256 << 10), ("tail", 1000), ("extras@step", 777)):
                with vault.store.gate.lock:
                    (place,) = vault.store.table.find(0, generation, name)
                assert bytes(place.view) == content(0, generation, name, nbytes)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


@pytest.fixture
def nodes(tmp_path):
    running = Nodes(tmp_path, 4)
    yield running
    running.stop()


@pytest.mark.parametrize("trouble", ["has not heard", "out of reach"])
def test_a_buddy_in_trouble_holds_no_other_up_and_has_its_copy_later(nodes, trouble):
    """It has not heard of the epoch yet, or a route to it is cut."""
    if trouble == "out of reach":
        nodes.network.cut_routes.add((("fake", 0), ("fake", 2)))
    nodes.adopt(*((0, 1, 3) if trouble == "has not heard" else ()))
    nodes.member.client.register(LAYOUT, 1)
    stepping = threading.Thread(target=nodes.member.step, args=(Generation(1, 0),), daemon=True)
    stepping.start()
    for number in (1, 3):
        there = partial(nodes.has_received, number, BYTES)
        wait_until(there, f"node {number} has its copy")
    assert stepping.is_alive(), "committed is what every buddy has"
    nodes.adopt(2)
    nodes.network.cut_routes.clear()
    stepping.join(20)
    assert not stepping.is_alive()
    nodes.member.step(Generation(1, 1))
    nodes.check(1)
    assert nodes.counter(0, "bytes shipped") == 3 * 2 * BYTES
    counters = nodes.vaults[2].status()["counters"]
    assert not any("refused" in name for name in counters), "early is no offence"
