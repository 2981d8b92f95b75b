"""What is read of a network interface; /sys/class/net is a directory of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.vault.net.interface import Interface, interface_of


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
