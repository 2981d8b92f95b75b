"""Ports that stay free until the program that is told of them listens there."""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_dice = random.SystemRandom()


def free_port() -> int:
    """Not one of those that the kernel hands out: whoever connects next could get it."""
    first_handed_out = int(_RANGE.read_text().split()[0])
    while True:
        port = _dice.randrange(10_000, first_handed_out)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
