"""The network interface that a vault's address belongs to: its counters, its speed, who uses it.

What the interface has sent, less what TCP has sent for the vault, is training's: gradients,
parameters, activations (FFTrainer sends its copies in their gaps). Nobody has to tell when it
communicates, and it needs no hook in the training process. Neighbours on the same interface count
as well, and what other vaults of the host send: nobody is to be held up by copies.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections import deque
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any

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
# Between what TCP has handed over and what the interface has counted lie some milliseconds of
# packets in queues. In such a time they come to less than the least share.
SPAN_SECONDS = 0.05
# Who takes less of the link than this is not disturbed, and may be acknowledgements.
_LEAST_SHARE = 0.1
# Headers of packets that are not joined, which the interface counts and TCP does not.
_HEADERS = 1.05
# The interface must count at least this of what was sent, once that was a share of the link.
_COUNTED = 0.1
_TELLING_SHARE = 0.25


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


class Origin(StrEnum):
    """The source from which the speed of a link is known."""

    CHECK = "the check of links"
    INTERFACE = "the network interface"
    SEEN = "the most that was seen on it"


@dataclass(frozen=True)
class LinkSpeed:
    """Of a node's link in one direction."""

    bytes_per_second: float
    origin: Origin

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as in the vault's status."""
        return {"bytes_per_second": self.bytes_per_second, "origin": self.origin}


def link_speed(checked: float, stated: float, seen: float) -> LinkSpeed | None:
    """Returns the best that is known of a link; None while nothing is.

    All in bytes per second, 0 for what is not known. ``checked``: what the check of links brought
    over. ``stated``: what the interface says, which may be more than the network behind it carries.
    ``seen``: what a shipment had that nothing held back, or the interface has sent in a moment,
    which may be less than the link has.
    """
    known = ((checked, Origin.CHECK), (stated, Origin.INTERFACE), (seen, Origin.SEEN))
    return next((LinkSpeed(speed, origin) for speed, origin in known if speed > 0), None)


class Use(Enum):
    """Of a link, by others."""

    OTHERS = auto()  # or not yet known: nothing may be taken for a gap
    IDLE = auto()
    NOT_COUNTED = auto()  # the counters stand still while the vault sends: they tell nothing


@dataclass(frozen=True)
class Reading:
    """Of all counters at one moment. ``now``: monotonic seconds. ``own_bytes``: what TCP has sent
    for the vault, read before ``sent_bytes``, what the interface has sent."""

    now: float
    sent_bytes: int
    own_bytes: int


class LinkUse:
    """Judges by the readings of the last moments. Not thread-safe."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()

    def bytes_per_second(self) -> float:
        """Returns what the interface has sent in the last moments, of everybody; 0 at first."""
        first, last = self._readings[0], self._readings[-1]
        seconds = last.now - first.now
        return (last.sent_bytes - first.sent_bytes) / seconds if seconds >= SPAN_SECONDS else 0.0

    def take(self, reading: Reading, bytes_per_second: float) -> Use:
        """Returns how the link, of this speed, is used, by this reading and those before."""
        readings = self._readings
        readings.append(reading)
        # The oldest one that is kept is the youngest that is old enough.
        while len(readings) > 2 and reading.now - readings[1].now >= SPAN_SECONDS:
            readings.popleft()
        first = readings[0]
        seconds = reading.now - first.now
        sent = reading.sent_bytes - first.sent_bytes
        own = reading.own_bytes - first.own_bytes
        if seconds < SPAN_SECONDS:
            return Use.OTHERS
        link = bytes_per_second * seconds
        if own > _TELLING_SHARE * link and sent < _COUNTED * own:
            return Use.NOT_COUNTED
        return Use.IDLE if sent - _HEADERS * own <= _LEAST_SHARE * link else Use.OTHERS
