"""Links between vaults: who answers, how many bytes come, and what a probe may not ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deadpool_megatron.preflight.facts import Link
from deadpool_megatron.vault.net import probe
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError
from tests.vault.fake_network import FakeNetwork, FakeTransport
from tests.vault.harness import cluster
from tests.vault.test_strangers import Peer, is_cut


@contextmanager
def answering(transport: FakeTransport, node: int) -> Iterator[None]:
    """A vault that serves one prober until it leaves."""

    def serve() -> None:
        channel = transport.await_one()
        try:
            while True:
                probe.answer(channel, node, channel.receive())
        except (WireError, OSError):
            channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join()


def probe_one(node: int, *, bulk: bool, serves: int = 1) -> Link:
    network = FakeNetwork()
    here, there = network.transport("a", 1, 10.0), network.transport("b", 1, 10.0)
    with answering(there, serves):
        (found,) = probe.probe(here, [(node, "b", 1)], bulk=bulk)
    return Link.from_dict(found)


def test_what_is_found_about_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MOST_BYTES", 2 * probe.PIECE_BYTES)
    link = probe_one(1, bulk=True)
    assert (link.peer, link.error) == (1, "")
    assert link.round_trip_seconds > 0
    assert abs(link.clock_seconds) <= link.round_trip_seconds
    assert link.bytes_per_second is not None
    assert link.bytes_per_second > 0
    assert probe_one(1, bulk=False).bytes_per_second is None


def test_another_node_at_the_address_is_no_link() -> None:
    assert probe_one(2, bulk=False).error == "node 1 answers there"


def test_nobody_there() -> None:
    here = FakeNetwork().transport("a", 1, 10.0)
    (found,) = probe.probe(here, [(1, "gone", 1)], bulk=True)
    assert found["error"] == "nobody listens there"
    assert probe.probe(here, [], bulk=True) == []


def test_real_vaults_reach_each_other_and_refuse_too_much(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as running:
        first, second = running.nodes
        assert first.control is not None
        ports = ((1, second.port), (7, second.port), (8, 1))
        peers = [(node, "127.0.0.1", port) for node, port in ports]
        found = first.order(first.control.probe(peers, 20.0, bulk=False))
        errors = [Link.from_dict(one).error for one in found]
        assert errors[0] == ""
        assert "another node" in errors[1]
        assert errors[2] == "nobody listens there"
        assert first.status()["link"] is None
        found = first.order(first.control.probe(peers[:1], 20.0, bulk=True))
        speed = Link.from_dict(found[0]).bytes_per_second
        link = {"bytes_per_second": speed, "origin": "the check of links"}
        assert first.status()["link"] == link
        for nbytes in (probe.PIECE_BYTES + 1, -1):
            stranger = Peer(running, 0)
            framing.send(stranger.socket, {"t": "probe", "nbytes": nbytes})
            assert is_cut(stranger.socket)
