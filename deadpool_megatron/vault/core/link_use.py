"""Whether anybody but the vault uses the link, by counters that are read now and then. Pure.

What the interface has sent, less what TCP has sent for the vault, is training's: gradients,
parameters, activations (FFTrainer sends its copies in their gaps). Nobody has to tell when it
communicates, and it needs no hook in the training process. Neighbours on the same interface count
as well, and what other vaults of the host send: nobody is to be held up by copies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

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
