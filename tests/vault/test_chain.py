"""Several buddies as a chain: who is reached through whom, and vaults in this process."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron import failpoints
from deadpool_megatron.layout.places.copies import CopyPlacement
from deadpool_megatron.layout.records import EpochRecord, Generation, NodeAddress, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import shipping
from deadpool_megatron.vault.chain import NOT_REACHED, Chain
from deadpool_megatron.vault.client import VaultClient
from deadpool_megatron.vault.service import Vault
from deadpool_megatron.vault.transport import FakeNetwork
from tests.vault.harness import content, make_layout, wait_until

SETTINGS = Settings(connect_seconds=5.0, chunk_bytes=4096)
LAYOUT = make_layout(0, nbytes=256 << 10)
BYTES = (256 << 10) + 1000 + 777


def test_the_first_of_those_alike_is_the_head() -> None:
    chain = Chain((5, 3, 8))
    work = {5: "a", 3: "a", 8: "a"}
    assert chain.links(3, 0, work.get) is None
    assert chain.links(8, 0, work.get) is None
    assert chain.links(5, 0, work.get) == (3, 8)
    work[3] = "b"
    assert chain.links(5, 0, work.get) == (8,)
    assert chain.links(3, 0, work.get) == ()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_the_hops_of_all_chains_spread_over_all_ports(copies: int, times: int, more: int) -> None:
    """One role on each node of a ring: each node sends and receives as often as there are copies,
    and where the ring divides evenly it always sends to the same one."""
    nodes = times * (copies + 1) + (more if copies < times else 0)
    seats = {role: role for role in range(nodes)}
    placement = CopyPlacement(seats, {node: f"rack{node}" for node in seats}, (), copies)
    hops: Counter[tuple[int, int]] = Counter()
    for role in seats:
        order = placement.buddies(role, tuple(seats))
        hops.update(itertools.pairwise((role, *order)))
    for end in (0, 1):
        ports = Counter[int]()
        for hop, count in hops.items():
            ports[hop[end]] += count
        assert set(ports.values()) == {copies}
    if nodes % (copies + 1) == 0:
        assert set(hops.values()) == {copies}


def test_who_is_taken_or_busy_is_nobodys_link() -> None:
    chain = Chain((5, 3, 8))
    work = dict.fromkeys((5, 3, 8), "a")
    chain.begin(5, (3,))
    assert chain.taken(3)
    assert chain.links(8, 0, work.get) == ()  # not through 5, which is busy
    chain.release(8, [3])
    assert chain.taken(3)  # only its own head gives it back
    chain.release(5, [3])
    assert chain.links(3, 0, work.get) == (8,)
    chain.idle(5)
    assert chain.links(3, 0, work.get) is None


def test_a_link_that_fails_is_tried_again_later_and_later() -> None:
    chain, work = Chain((5, 3)), dict.fromkeys((5, 3), "a")
    iteration, gaps = 100, []
    for _ in range(9):
        chain.failed(3, iteration, "late")
        assert chain.links(5, iteration, work.get) == ()
        assert chain.links(3, iteration, work.get) == ()
        begin = iteration
        while not chain.links(5, iteration, work.get):
            iteration += 1
        gaps.append(iteration - begin)
    assert gaps == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    chain.reached(3)
    for innocent in ("early", "superseded", NOT_REACHED):
        chain.failed(3, iteration, innocent)
    assert chain.links(5, iteration, work.get) == (3,)


class Nodes:
    """Vaults 0..n-1 on a fake network; the member of role 0 on node 0, all others are buddies."""

    def __init__(self, directory: Path, count: int) -> None:
        self.network = FakeNetwork()
        self.vaults: list[Vault] = []
        self._threads: list[threading.Thread] = []
        self._listeners: list[socket.socket] = []
        self._replicas = count - 1
        for number in range(count):
            place = directory / "deadpool-chain" / f"node{number}"
            place.mkdir(parents=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(place / "vault.sock"))
            listener.listen()
            transport = self.network.transport("fake", number, deadline_seconds=5.0)
            vault = Vault(number, place, SETTINGS, transport, listener)
            vault.start()
            self.vaults.append(vault)
            self._listeners.append(listener)
            self._threads.append(threading.Thread(target=vault.wait))
            self._threads[-1].start()
        place = directory / "deadpool-chain" / "node0"
        self.client = VaultClient(
            str(place / "vault.sock"), place, Seat(0, 0, 0), connect_seconds=5.0
        )
        self.interrupt = socket.socketpair()

    def record(self) -> EpochRecord:
        return EpochRecord(
            epoch=1,
            seats={0: Seat(0, 0, 0)},
            nodes={n: NodeAddress("fake", n, f"rack{n}", n > 0) for n in range(len(self.vaults))},
            restore=Restore("initial", Generation(1, 0)),
            replicas=self._replicas,
        )

    def adopt(self, *numbers: int) -> None:
        for number in numbers or range(len(self.vaults)):
            self.vaults[number].adopt(self.record())

    def order(self) -> tuple[int, ...]:
        """The buddies of role 0, the head first."""
        ledger = self.vaults[0]._state.ledger
        assert ledger is not None
        return ledger.buddies(LAYOUT)

    def step(self, iteration: int) -> None:
        """Fill a generation and wait until it is committed."""
        generation = Generation(1, iteration)
        writer = self.client.begin(generation, 1)
        sizes = {"shard": 256 << 10, "tail": 1000, "extras@step": 777}
        for name, nbytes in sizes.items():
            writer.part(name)[:nbytes] = content(0, generation, name, nbytes)
        writer.fill(sizes)
        verdict = self.client.wait_committed(
            generation,
            "step",
            deadline_seconds=20,
            interrupted=self.interrupt[0].fileno(),
            on_wait=lambda _: pytest.fail("the gate stays shut"),
            report_every_seconds=20,
        )
        assert verdict == "committed"

    def counter(self, number: int, name: str) -> int:
        counters = self.vaults[number].status()["counters"]
        return int(counters.get(name, 0))

    def check(self, iteration: int) -> None:
        """Every buddy holds every byte of the generation."""
        generation = Generation(1, iteration)
        for vault in self.vaults[1:]:
            for name, nbytes in (("shard", 256 << 10), ("tail", 1000), ("extras@step", 777)):
                with vault._state.lock:
                    (place,) = vault._state.table.find(0, generation, name)
                assert bytes(place.view) == content(0, generation, name, nbytes)

    def no_pins(self) -> None:
        for vault in self.vaults:
            assert not any(vault._state.table.pins.values())
            assert not vault._state.table.writers

    def stop(self) -> None:
        self.client.close()
        for vault in self.vaults:
            vault.stop(remove=True)
        for thread in self._threads:
            thread.join(10)
        for listener in (*self._listeners, *self.interrupt):
            listener.close()


@pytest.fixture
def nodes(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Nodes]:
    # A busy machine is no broken link.
    monkeypatch.setattr(shipping, "_LINK_SECONDS", 10.0)
    running = Nodes(tmp_path, getattr(request, "param", 4))
    yield running
    running.stop()


def test_the_owner_sends_each_byte_once(nodes: Nodes) -> None:
    nodes.adopt()
    nodes.client.register(LAYOUT, 1)
    for iteration in range(5):
        nodes.step(iteration)
    nodes.check(4)
    head, second, last = nodes.order()
    assert nodes.counter(0, "bytes shipped") == 5 * BYTES
    assert nodes.counter(head, "bytes handed on") == 5 * BYTES
    assert nodes.counter(second, "bytes handed on") == 5 * BYTES
    assert nodes.counter(last, "bytes handed on") == 0
    assert [nodes.counter(n, "bytes received") for n in (1, 2, 3)] == [5 * BYTES] * 3
    assert nodes.vaults[0].status()["fit"]["0"]["ship_seconds"] > 0
    wait_until(lambda: nodes.no_pins() is None, "nothing is pinned")


def test_a_broken_link_costs_the_earlier_copies_nothing(nodes: Nodes) -> None:
    nodes.adopt()
    head, second, _ = nodes.order()
    nodes.network.cut_routes.add((("fake", head), ("fake", second)))
    nodes.client.register(LAYOUT, 1)
    nodes.step(0)
    nodes.check(0)
    # Of the first generation the last one was not reached through the second: directly, both.
    assert nodes.counter(0, "bytes shipped") == 3 * BYTES
    nodes.step(1)
    nodes.check(1)
    # From then on the second one gets its own, and the others are a chain.
    assert nodes.counter(0, "bytes shipped") == 5 * BYTES
    assert nodes.counter(head, "bytes handed on") == BYTES
    nodes.network.cut_routes.clear()
    for iteration in range(2, 17):
        nodes.step(iteration)
    shipped = nodes.counter(0, "bytes shipped")
    nodes.step(17)
    nodes.check(17)
    assert nodes.counter(0, "bytes shipped") - shipped == BYTES  # the chain is whole again


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_buddy_behind_that_has_not_heard_of_the_epoch_yet(nodes: Nodes) -> None:
    """It holds nobody up, and is not held to have failed."""
    nodes.adopt(0)
    head, last = nodes.order()
    nodes.adopt(head)
    nodes.client.register(LAYOUT, 1)
    stepping = threading.Thread(target=nodes.step, args=(0,), daemon=True)
    stepping.start()
    wait_until(lambda: nodes.counter(head, "bytes received") == BYTES, "the head has its copy")
    nodes.adopt(last)
    stepping.join(20)
    assert not stepping.is_alive()
    before = nodes.counter(0, "bytes shipped")
    nodes.step(1)
    assert nodes.counter(0, "bytes shipped") - before == BYTES
    nodes.check(1)


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_bytes_damaged_between_buddies_are_sent_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.adopt()
    head, last = nodes.order()
    hits: list[int] = []

    def hit(point: str, **facts: object) -> object:
        if point == "vault.relay" and facts["part"] == "shard" and facts["iteration"] == 1:
            hits.append(1)
            return object() if len(hits) == 3 else None
        return None

    monkeypatch.setattr(failpoints, "hit", hit)
    nodes.client.register(LAYOUT, 1)
    for iteration in range(3):
        nodes.step(iteration)
    nodes.check(2)
    assert nodes.counter(last, "corruption") == 1
    assert nodes.counter(head, "corruption") == 0
    assert nodes.counter(0, "bytes shipped") == 3 * BYTES + (256 << 10)


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_link_that_hangs_is_left_alone_in_time(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has its copy at once; the one behind hangs in the middle and is served directly."""
    nodes.adopt()
    monkeypatch.setattr(shipping, "_LINK_SECONDS", 0.5)
    hanging = threading.Event()

    def hit(point: str, **facts: object) -> None:
        if point == "vault.relay" and facts["part"] == "shard" and facts["iteration"] == 1:
            hanging.wait(20)

    monkeypatch.setattr(failpoints, "hit", hit)
    nodes.client.register(LAYOUT, 1)
    nodes.step(0)
    nodes.step(1)
    nodes.step(2)
    hanging.set()
    nodes.step(3)
    nodes.check(3)
    assert nodes.counter(0, "bytes shipped") == (1 + 2 + 2 + 2) * BYTES
    wait_until(lambda: nodes.no_pins() is None, "nothing is pinned")
