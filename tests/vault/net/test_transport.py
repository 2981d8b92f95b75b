"""What a channel asks of the kernel: a class, a place in the queue, and how long it was busy."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deadpool_megatron.preflight.facts import Link
from deadpool_megatron.vault.net import probe
from deadpool_megatron.vault.net.transport import Channel, Sent
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError
from deadpool_megatron.wire.records import RecordSocket
from tests.vault.fake_network import FakeNetwork, FakeTransport
from tests.vault.harness import cluster
from tests.vault.test_strangers import Peer, is_cut

FAMILIES = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}

# Bytes that TCP has not sent yet, linux/sockios.h.
_SIOCOUTQNSD = 0x894B


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[RecordSocket, RecordSocket]]:
    family = request.param
    try:
        listener = socket.create_server((FAMILIES[family], 0), family=family)
    except OSError:
        pytest.skip("no such addresses here")
    with listener:
        near = RecordSocket.of(socket.create_connection(listener.getsockname()[:2]))
        with near, RecordSocket.of(listener.accept()[0]) as far:
            yield near, far


def class_of(connection: socket.socket) -> tuple[int, int]:
    """Traffic class byte and priority in the own machine's queues."""
    if connection.family == socket.AF_INET6:
        byte = connection.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    else:
        byte = connection.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
    return byte, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)


@pytest.mark.parametrize("dscp", [0, 8, 63])
def test_each_end_marks_what_it_sends(pair: tuple[RecordSocket, RecordSocket], dscp: int) -> None:
    near, far = pair
    assert class_of(near) == class_of(far) == (0, 0)
    Channel(near, 5.0, None, "").give_way(dscp)
    assert class_of(near) == (dscp << 2, 2)
    assert class_of(far) == (0, 0)
    Channel(far, 5.0, None, "").give_way(dscp)
    assert class_of(far) == (dscp << 2, 2)


def test_the_kernel_counts_bytes_and_how_long_they_were_on_their_way(
    pair: tuple[RecordSocket, RecordSocket],
) -> None:
    near, far = (Channel(end, 5.0, None, "") for end in pair)
    before = near.sent().busy_seconds
    sent = bytes(8 << 20)
    sending = threading.Thread(target=near.send_bulk, args=(memoryview(sent),))
    sending.start()
    # In ticks of the kernel: nobody reads until it has counted one.
    end = time.monotonic() + 10
    while near.sent().busy_seconds <= before and time.monotonic() < end:
        time.sleep(0.005)
    got = bytearray(len(sent))
    far.receive_bulk(memoryview(got))
    sending.join(10)
    assert near.sent().busy_seconds > before
    assert near.sent().nbytes >= len(sent)
    assert far.sent().nbytes < 100
    near.close()
    assert near.sent() == Sent()


def test_little_of_a_copy_waits_in_a_socket(pair: tuple[RecordSocket, RecordSocket]) -> None:
    """What it has taken goes on leaving when training begins to send."""
    near, _ = pair
    Channel(near, 5.0, None, "").give_way(0)
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 20))
    (unsent,) = struct.unpack("i", fcntl.ioctl(near, _SIOCOUTQNSD, bytes(4)))
    assert 0 < unsent <= 512 << 10


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
