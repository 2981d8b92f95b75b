"""The network interface that a vault's address belongs to, as Linux shows it in /sys/class/net."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SYSFS = Path("/sys/class/net")
_SIOCGIFADDR = 0x8915
_BYTES_PER_MEGABIT = 1e6 / 8


def interface_of(address: str) -> str:
    """Returns the interface whose first IPv4 address this is; empty where there is none."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


class Interface:
    """One interface; ``name`` is empty where none is known. ``sysfs`` is another one in tests."""

    def __init__(self, name: str, sysfs: Path = _SYSFS) -> None:
        self.name = name
        self._directory = sysfs / name

    def bytes_per_second(self) -> float:
        """Returns its speed in one direction by its own word, 0 where it does not say.

        A virtual interface (veth in a container) names a speed that nothing stands behind.
        """
        has_hardware = any((self._directory / part).exists() for part in ("device", "bonding"))
        if not self.name or not has_hardware:
            return 0.0
        try:
            megabits = int((self._directory / "speed").read_text())
        except (OSError, ValueError):
            return 0.0
        return max(0, megabits) * _BYTES_PER_MEGABIT
