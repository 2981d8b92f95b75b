"""The network interface that a vault's address belongs to, as Linux shows it in /sys/class/net."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SYSFS = Path("/sys/class/net")
# Of the process's own network namespace, whatever is mounted on /sys.
_COUNTERS = Path("/proc/self/net/dev")
# Of the columns after the name: eight of what was received, then the bytes sent.
_SENT_BYTES = 8
_SIOCGIFADDR = 0x8915
_BYTES_PER_MEGABIT = 1e6 / 8
# port_xmit_data counts words.
_BYTES_PER_WORD = 4
_ARPHRD_INFINIBAND = "32"


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
    """One interface; ``name`` is empty where none is known. The files are other ones in tests."""

    def __init__(self, name: str, sysfs: Path = _SYSFS, counters: Path = _COUNTERS) -> None:
        self.name = name
        self._directory = sysfs / name
        self._counters = counters
        # RDMA passes by the counters of an Ethernet interface. Those of an InfiniBand port have
        # what the IP interface on it sends as well.
        ports = self._directory.glob("device/infiniband/*/ports/*/counters/port_xmit_data")
        self._rdma_ports = sorted(ports) if name else []
        self._is_infiniband = bool(self._rdma_ports) and self._type() == _ARPHRD_INFINIBAND

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

    def _type(self) -> str:
        try:
            return (self._directory / "type").read_text().strip()
        except OSError:
            return ""

    def sent_bytes(self) -> int:
        """Returns the bytes that have left by it so far, those of RDMA too. Raises OSError or
        ValueError where nobody counts them."""
        if not self.name:
            raise OSError("the vault's address is of no known interface")
        total = 0 if self._is_infiniband else self._ip_bytes()
        return total + _BYTES_PER_WORD * sum(int(port.read_bytes()) for port in self._rdma_ports)

    def _ip_bytes(self) -> int:
        for line in self._counters.read_text().splitlines():
            name, _, columns = line.partition(":")
            if name.strip() == self.name and len(counts := columns.split()) > _SENT_BYTES:
                return int(counts[_SENT_BYTES])
        raise OSError("there is no such interface any more, or it counts nothing")
