"""Limits of what is said between agents and the coordinator: how often things are said that cost
more the larger the cluster is, and how much is kept that was not acknowledged. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from deadpool_megatron.settings import Settings

# Of all agents together; measured, a coordinator spends a small part of one core on so many.
_BEATS_PER_SECOND = 4000.0
_ROUTINE_EVENTS_PER_ITERATION = 512
_ROLES_AT_ONCE = 512
_ROLES_REPEATED_PER_SECOND = 2000.0
# Who asks at about the same period would else miss every other time by a hair.
_EARLY = 0.95
# Of the fence limit: contact is in doubt. Two beats fit in it, and it fits three times and more
# into what is left for trying other connections.
_DOUBT = 1 / 6


def beat_seconds(agents: int, settings: Settings) -> float:
    """The time between two beats of an agent: settings.beat_interval_seconds in a small cluster,
    more in a large one, but never so much that one late beat looks like a cut-off node.
    """
    longest = _DOUBT * settings.fence_seconds
    return max(settings.beat_interval_seconds, min(agents / _BEATS_PER_SECOND, longest))


def acknowledge_seconds(settings: Settings) -> float:
    """The time in which one acknowledgement is enough, however many beats arrive."""
    return _DOUBT * settings.fence_seconds / 4


def contact_seconds(beat_seconds: float, settings: Settings) -> float:
    """An agent that has heard nothing for longer tries a second connection beside the present."""
    return max(_DOUBT * settings.fence_seconds, 2 * beat_seconds)


def answer_seconds(settings: Settings) -> float:
    """An agent whose greeting is not answered for longer sends another one beside it, the next one
    after twice that. The first two are over before the limit of the fence.
    """
    return 2 * _DOUBT * settings.fence_seconds


def repeat_seconds(roles: int) -> float:
    """The time over which agents spread what a new coordinator has to hear again. In a large run
    that is more than it can take at once, and it must first welcome every agent.
    """
    return 0.0 if roles <= _ROLES_AT_ONCE else roles / _ROLES_REPEATED_PER_SECOND


def hang_look_seconds(settings: Settings) -> float:
    """The time between two looks for a hang: a small part of the limit that is looked for."""
    return max(settings.beat_interval_seconds, min(settings.hang_seconds / 20, 2.0))


def is_reported(role: int, iteration: int, roles: int) -> bool:
    """True where a routine event (sealed, committed) of a role goes to the coordinator: always in
    a small run; in a large one each iteration that of other roles, about 512 in all.
    """
    share = -(-roles // _ROUTINE_EVENTS_PER_ITERATION)
    return (role + iteration) % share == 0


class RateLimiter:
    """Tells whether it is time again. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last = float("-inf")

    def is_due(self, now: float) -> bool:
        """True where the last time is long enough ago; if so, this is the last time from now on."""
        if now - self._last < _EARLY * self.seconds:
            return False
        self._last = now
        return True


class RetransmitQueue:
    """Messages of one end to the other, and those that it has not acknowledged yet: numbered frames
    in order, the oldest first. Not thread-safe.
    """

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._frames: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    @property
    def is_over_full(self) -> bool:
        """True where it holds more than what was allowed."""
        return len(self._frames) > self._max_frames or self._bytes > self._max_bytes

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return iter(self._frames)

    def add(self, number: int, frame: bytes) -> None:
        """Keep a frame; ``number`` is higher than all before."""
        self._frames.append((number, frame))
        self._bytes += len(frame)

    def drop_oldest(self) -> None:
        """Give the oldest frame up."""
        self._bytes -= len(self._frames.popleft()[1])

    def acknowledge(self, number: int) -> None:
        """The other end has taken everything up to ``number``."""
        while self._frames and self._frames[0][0] <= number:
            self.drop_oldest()
