"""A vault on several addresses: each carries its share, and a broken one costs its share only."""

import pytest

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.settings import Settings
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import Member, make_layout, record_of, train, wait_until
from tests.vault.local_node import LocalNode

HOSTS = ("fake", "b", "c", "d")
ROLES = range(4)
BYTES = (64 << 10) + 1000 + 777


class Lanes:
    """Two vaults with four addresses each; the roles of node 0 have their copies on node 1."""

    def __init__(self, directory, monkeypatch):
        monkeypatch.setattr("deadpool_megatron.vault.lanes._RETRY_SECONDS", 0.02)
        self.network = FakeNetwork()
        self.nodes = [
            LocalNode(self.network, n, directory / "deadpool-lanes" / f"node{n}", Settings(), HOSTS)
            for n in range(2)
        ]
        self.warnings: list[str] = []
        self.nodes[0].vault.store.reports.send = self.note
        self.generation = Generation(1, 0)
        for node in self.nodes:
            node.vault.adopt(record_of(seats={role: Seat(0, role, 0) for role in ROLES}))
        layouts = [make_layout(role, peers=(role,)) for role in ROLES]
        self.members = [Member(self.nodes[0], each, 1, slot=each.role) for each in layouts]

    def note(self, event: Event) -> None:
        if event.kind is Kind.LOG:
            self.warnings.append(event.data["text"])

    def step(self):
        """Commit a generation; the bytes that each interface has carried of it."""
        before = dict(self.nodes[0].vault.store.reports.counters)
        train(self.members, self.generation)
        self.generation = Generation(1, self.generation.iteration + 1)
        counters = self.nodes[0].vault.status()["counters"]
        names = {host: f"bytes shipped over {host}" for host in HOSTS}
        return {host: counters.get(n, 0) - before.get(n, 0) for host, n in names.items()}


@pytest.fixture
def lanes(tmp_path, monkeypatch):
    running = Lanes(tmp_path, monkeypatch)
    yield running
    for node in running.nodes:
        node.stop()


def test_lanes_share_roles_and_replace_a_broken_lane(lanes):
    assert lanes.step() == dict.fromkeys(HOSTS, BYTES)

    lanes.network.sever("b")
    carried = lanes.step()
    assert carried["b"] == 0
    assert sum(carried.values()) == 4 * BYTES
    assert min(carried[host] for host in HOSTS if host != "b") == BYTES
    assert lanes.step() == carried
    wait_until(lambda: lanes.warnings, "a warning")
    assert ["from b" in text and "fail" in text for text in lanes.warnings] == [True]

    lanes.network.cut.clear()
    wait_until(lambda: len(lanes.warnings) == 2, "the lane answers again")
    assert lanes.step() == dict.fromkeys(HOSTS, BYTES)


def test_lanes_all_broken_answer_later(lanes):
    lanes.step()
    for host in HOSTS:
        lanes.network.sever(host)
    for member in lanes.members:
        member.write(lanes.generation)
    known = lanes.nodes[0].vault.store.gate.lanes.lanes
    wait_until(lambda: all(lane.broken for lane in known), "each lane is given up")
    lanes.network.cut.clear()
    for member in lanes.members:
        assert member.wait(lanes.generation) == "committed"
    wait_until(lambda: not any(lane.broken for lane in known), "each lane is back")


def test_lanes_of_absent_nodes_are_forgotten(lanes):
    lanes.step()
    lanes.network.sever("b")
    lanes.step()
    known, vault = lanes.nodes[0].vault.store.gate.lanes, lanes.nodes[0].vault
    assert [len(lane.broken) for lane in known.lanes] == [0, 1, 0, 0]
    vault.close_epoch(1)
    alone = record_of(2, seats={role: Seat(0, role, 0) for role in ROLES}, count=1)
    vault.adopt(alone)
    assert not any(lane.broken for lane in known.lanes)
