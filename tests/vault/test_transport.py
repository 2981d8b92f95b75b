"""What a channel asks of the kernel: a class, a place in the queue, and how long it was busy."""

import contextlib
import fcntl
import math
import socket
import struct
import threading
import time

import pytest

from deadpool_megatron.layout.records import Generation, Source
from deadpool_megatron.vault.transport import UNREACHABLE, Channel, Sent, ask_elsewhere, ask_part
from deadpool_megatron.wire.sealed_records import RecordSocket
from tests.vault.fake_network import FakeNetwork

FAMILIES = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}

# Bytes that TCP has not sent yet, linux/sockios.h.
_SIOCOUTQNSD = 0x894B


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def pair(request):
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
    """Traffic class byte and priority in the queues of this machine."""
    if connection.family == socket.AF_INET6:
        byte = connection.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    else:
        byte = connection.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
    return byte, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)


@pytest.mark.parametrize("dscp", [0, 8, 63])
def test_each_end_of_a_channel_marks_its_packets(pair, dscp):
    near, far = pair
    assert class_of(near) == class_of(far) == (0, 0)
    Channel(near, 5.0, None, "").lower_priority(dscp)
    assert class_of(near) == (dscp << 2, 2)
    assert class_of(far) == (0, 0)
    Channel(far, 5.0, None, "").lower_priority(dscp)
    assert class_of(far) == (dscp << 2, 2)


def test_the_kernel_counts_bytes_and_how_long_they_were_on_their_way(pair):
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


def test_little_of_a_copy_waits_in_a_socket(pair):
    """Bytes that it has taken continue to leave when training begins to send."""
    near, _ = pair
    Channel(near, 5.0, None, "").lower_priority(0)
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 20))
    (unsent,) = struct.unpack("i", fcntl.ioctl(near, _SIOCOUTQNSD, bytes(4)))
    assert 0 < unsent <= 512 << 10


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
def test_a_malformed_answer_is_as_good_as_none(answer):
    """It ends no vault: who asked continues with the next place."""
    network = FakeNetwork()
    here, there = network.transport("a", 1, 5.0), network.transport("b", 1, 5.0)
    channel = here.connect(1, "b", 1)
    peer = there.await_one()
    for _ in range(2):
        peer.send(answer)
    with pytest.raises(UNREACHABLE):
        ask_part(channel, 1, *ASKED, "shard")
    with pytest.raises(UNREACHABLE):
        ask_elsewhere(channel, *ASKED)
    channel.close()
    peer.close()
