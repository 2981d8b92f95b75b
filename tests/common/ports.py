"""Ports that stay free until the program that gets them listens there."""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_dice = random.SystemRandom()


def free_port() -> int:
    """Return a port outside the range that the kernel assigns to connections."""
    first_handed_out = int(_RANGE.read_text().split()[0])
    while True:
        port = _dice.randrange(10_000, first_handed_out)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
