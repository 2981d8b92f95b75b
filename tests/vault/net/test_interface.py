"""What is read of a network interface; /sys/class/net is a directory of the test."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from deadpool_megatron.vault.net.interface import Interface, interface_of

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
