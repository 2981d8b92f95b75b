"""What is read of a network interface; /sys/class/net is a directory of the test."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.vault.core.interface import (
    SPAN_SECONDS,
    Interface,
    LinkUse,
    Reading,
    Use,
    interface_of,
)

_TABLE = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls
    lo: 77 2 0 0 0 0 0 0 88 2 0 0 0 0 0 0
  eth7: 500 5 0 0 0 0 0 0 1000 7 0 0 0 0 0 0
"""


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
    assert interface_of("::1") == ""


@pytest.mark.parametrize(
    ("part", "speed", "bytes_per_second"),
    [
        ("device", "25000\n", 3.125e9),
        ("bonding", "200000\n", 25e9),
        ("lower_x", "10000\n", 0.0),  # a veth: what it says is not what is behind it
        ("device", "-1\n", 0.0),
        ("device", "", 0.0),
    ],
)
def test_the_speed_an_interface_states(
    tmp_path: Path, part: str, speed: str, bytes_per_second: float
) -> None:
    (tmp_path / "eth7" / part).mkdir(parents=True)
    (tmp_path / "eth7" / "speed").write_text(speed)
    assert Interface("eth7", tmp_path).bytes_per_second() == bytes_per_second


def test_no_interface_has_no_speed(tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    (tmp_path / "speed").write_text("1000")
    assert Interface("", tmp_path).bytes_per_second() == 0.0
    assert Interface("gone0", tmp_path).bytes_per_second() == 0.0


def test_what_has_left_by_an_interface(tmp_path: Path) -> None:
    """RDMA passes by the counters of an Ethernet interface; an InfiniBand port counts all."""
    table = tmp_path / "dev"
    table.write_text(_TABLE)
    (tmp_path / "eth7").mkdir()
    assert Interface("eth7", tmp_path, table).sent_bytes() == 1000
    for port, words in (("1", "10\n"), ("2", "5\n")):
        counters = tmp_path / "eth7" / "device" / "infiniband" / "mlx5_0" / "ports" / port
        (counters / "counters").mkdir(parents=True)
        (counters / "counters" / "port_xmit_data").write_text(words)
    (tmp_path / "eth7" / "type").write_text("1\n")
    assert Interface("eth7", tmp_path, table).sent_bytes() == 1060
    (tmp_path / "eth7" / "type").write_text("32\n")
    assert Interface("eth7", tmp_path, table).sent_bytes() == 60


def test_what_is_not_counted(tmp_path: Path) -> None:
    for name, why in (("", "of no known interface"), ("gone0", "no such interface")):
        with pytest.raises(OSError, match=why):
            Interface(name, tmp_path).sent_bytes()


def test_this_machine_counts_what_is_sent() -> None:
    loopback = Interface("lo")
    before, sent = loopback.sent_bytes(), bytes(4 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), 10.0)
        far, _ = server.accept()
        with near, far:
            sending = threading.Thread(target=near.sendall, args=(sent,))
            sending.start()
            left = len(sent)
            while left:
                left -= len(far.recv(1 << 20))
            sending.join(10)
    assert loopback.sent_bytes() >= before + len(sent)


_TICK_SECONDS = 0.01
# More than enough for all that was seen before to be forgotten.
_TICKS = 2 * round(SPAN_SECONDS / _TICK_SECONDS)
# Of the bytes that the interface counts for those of TCP; not more than packets without offloading.
_HEADERS = 1.046


class Made:
    """A link whose counters are read in ticks; rates are shares of its speed."""

    def __init__(self, link: float, queue: random.Random | None = None) -> None:
        self.link = link
        self.use = LinkUse()
        self.now, self.others, self.own = 1000.0, 5e9, 7e9
        self._queue = queue

    def tick(self, *, others: float, own: float, seconds: float = _TICK_SECONDS) -> Use:
        """Time passes; what is found at the end of it."""
        self.now += seconds
        self.others += others * self.link * seconds
        self.own += own * self.link * seconds
        # TCP has counted what is still in a queue, some milliseconds at most.
        late = self._queue.uniform(0, 0.003) * self.link if self._queue and own else 0.0
        sent = self.others + _HEADERS * (self.own - late)
        return self.use.take(Reading(self.now, int(sent), int(self.own)), self.link)

    def ticks(self, *, others: float, own: float) -> list[Use]:
        """Enough of them."""
        return [self.tick(others=others, own=own) for _ in range(_TICKS)]


def test_nothing_is_a_gap_until_enough_was_seen() -> None:
    made = Made(1e9)
    found = made.ticks(others=0.0, own=0.0)
    seen = round(SPAN_SECONDS / _TICK_SECONDS)
    assert found[: seen - 1] == [Use.OTHERS] * (seen - 1)
    assert found[seen + 1 :] == [Use.IDLE] * (len(found) - seen - 1)


@given(st.floats(1e7, 5e10), st.floats(0.0, 1.0), st.randoms(use_true_random=False))
def test_copies_are_not_taken_for_training(link: float, own: float, queue: random.Random) -> None:
    """At any pace, with headers, and with packets in queues when the counters are read."""
    made = Made(link, queue)
    assert set(made.ticks(others=0.0, own=own)[_TICKS // 2 + 1 :]) == {Use.IDLE}


@given(st.floats(1e7, 5e10), st.floats(0.2, 1.0), st.randoms(use_true_random=False))
def test_training_is_seen_beside_copies_that_take_the_rest(
    link: float, others: float, queue: random.Random
) -> None:
    """From a fifth of the link on, whatever of the copies is in queues; a tenth without any."""
    made = Made(link, queue)
    made.ticks(others=0.0, own=1.0)
    assert made.ticks(others=others, own=1.0 - others)[-1] is Use.OTHERS


def test_a_short_burst_is_seen_and_forgotten() -> None:
    """A bucket of gradients that takes the link for 10 ms, and is over."""
    made = Made(1e9)
    assert made.ticks(others=0.0, own=0.0)[-1] is Use.IDLE
    made.tick(others=1.0, own=0.0)
    assert made.tick(others=1.0, own=0.0) is Use.OTHERS
    assert made.ticks(others=0.0, own=0.0)[-1] is Use.IDLE


def test_a_trickle_is_no_training() -> None:
    """Signs of life, acknowledgements."""
    made = Made(1e9)
    assert made.ticks(others=0.05, own=0.0)[-1] is Use.IDLE


def test_a_reader_that_had_no_processor_for_a_while_judges_by_what_passed() -> None:
    made = Made(1e9)
    made.ticks(others=0.0, own=0.0)
    assert made.tick(others=0.5, own=0.0, seconds=2.0) is Use.OTHERS
    assert made.tick(others=0.0, own=0.0, seconds=2.0) is Use.IDLE


def test_counters_that_stand_still_tell_nothing() -> None:
    """Of a driver that asks its device once a second, or of an interface that copies do not use."""
    link, use = 1e9, LinkUse()
    found = [use.take(Reading(k * _TICK_SECONDS, 10**9, 0), link) for k in range(_TICKS)]
    assert found[-1] is Use.IDLE
    own = [int(k * _TICK_SECONDS * link) for k in range(_TICKS)]
    later = _TICKS * _TICK_SECONDS
    found = [
        use.take(Reading(later + k * _TICK_SECONDS, 10**9, own[k]), link) for k in range(_TICKS)
    ]
    assert found[-1] is Use.NOT_COUNTED


def test_what_is_remembered_is_a_moment() -> None:
    made = Made(1e9)
    for _ in range(1000):
        made.tick(others=0.3, own=0.3)
    assert len(made.use._readings) <= _TICKS
