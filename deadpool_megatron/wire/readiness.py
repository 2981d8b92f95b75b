"""Waiting for one descriptor with a deadline, whatever its number.

``select.select`` refuses descriptors above 1023. A training process has more: data files, loaders,
and some sockets for each peer.
"""

from __future__ import annotations

import math
import select


def readable(descriptor: int, seconds: float) -> bool:
    """Wait until there is something to read, or the other end is gone; False after ``seconds``."""
    return _ready(descriptor, select.POLLIN, seconds)


def writable(descriptor: int, seconds: float) -> bool:
    """Wait until something can be written, or the other end is gone; False after ``seconds``."""
    return _ready(descriptor, select.POLLOUT, seconds)


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    # Upwards: a wait of less than a millisecond must not become a loop without one.
    return bool(poll.poll(math.ceil(1000 * max(0.0, seconds))))
