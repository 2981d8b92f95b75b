"""Limits on messages between agents and the coordinator: the rate of messages whose number grows
with the cluster, and the amount of unacknowledged messages. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from deadpool_megatron.settings import Settings

# For all agents together; as measured, this rate takes a small part of one core of a coordinator.
_BEATS_PER_SECOND = 4000.0
_ROUTINE_EVENTS_PER_ITERATION = 512
_ROLES_AT_ONCE = 512
_ROLES_REPEATED_PER_SECOND = 2000.0
# An action is due after this fraction of its period. Otherwise a caller with about the same period
# would narrowly miss every second action.
_EARLY = 0.95
# The fraction of the fence limit after which contact is uncertain. It covers two beats, and leaves
# most of the limit for attempts at other connections.
_UNCERTAIN_FRACTION = 1 / 6


def beat_seconds(agents: int, settings: Settings) -> float:
    """Return the time between two beats of an agent: settings.beat_interval_seconds in a small
    cluster, more in a large cluster, but short enough that a late beat does not look like a cut.
    """
    longest = _UNCERTAIN_FRACTION * settings.fence_seconds
    return max(settings.beat_interval_seconds, min(agents / _BEATS_PER_SECOND, longest))


def acknowledge_seconds(settings: Settings) -> float:
    """Return the time in which one acknowledgement is enough, however many beats arrive."""
    return _UNCERTAIN_FRACTION * settings.fence_seconds / 4


def contact_seconds(beat_seconds: float, settings: Settings) -> float:
    """Return the silence after which an agent tries a second connection in parallel."""
    return max(_UNCERTAIN_FRACTION * settings.fence_seconds, 2 * beat_seconds)


def answer_seconds(settings: Settings) -> float:
    """Return the time that an agent waits for an answer to its greeting before it sends a second
    greeting in parallel. It waits twice as long for an answer to the second. Both waits together
    last as long as the fence's limit.
    """
    return 2 * _UNCERTAIN_FRACTION * settings.fence_seconds


def repeat_seconds(roles: int) -> float:
    """Return the time over which agents spread their repeated reports to a new coordinator. In a
    large run the coordinator cannot take all reports at once, and must first welcome every agent.
    """
    return 0.0 if roles <= _ROLES_AT_ONCE else roles / _ROLES_REPEATED_PER_SECOND


def hang_look_seconds(settings: Settings) -> float:
    """Return the time between two checks for a hang, a small part of the hang limit."""
    return max(settings.beat_interval_seconds, min(settings.hang_seconds / 20, 2.0))


def is_reported(role: int, iteration: int, roles: int) -> bool:
    """Return whether a routine event (sealed, committed) of a role goes to the coordinator: always
    in a small run; in a large run about 512 roles report in each iteration, in rotation.
    """
    share = -(-roles // _ROUTINE_EVENTS_PER_ITERATION)
    return (role + iteration) % share == 0


class RateLimiter:
    """A minimum period between two actions. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last = float("-inf")

    def is_due(self, now: float) -> bool:
        """Return whether the period has passed since the last action; if so, ``now`` is the time of
        the last action from now on."""
        if now - self._last < _EARLY * self.seconds:
            return False
        self._last = now
        return True


class RetransmitQueue:
    """Frames that the other end has not acknowledged yet: numbered, in order, the oldest first.
    Not thread-safe.
    """

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._frames: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    @property
    def is_over_full(self) -> bool:
        """Return whether the queue holds more than its limits."""
        return len(self._frames) > self._max_frames or self._bytes > self._max_bytes

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return iter(self._frames)

    def add(self, number: int, frame: bytes) -> None:
        """Keep a frame; ``number`` is higher than all earlier numbers."""
        self._frames.append((number, frame))
        self._bytes += len(frame)

    def drop_oldest(self) -> None:
        """Drop the oldest frame."""
        self._bytes -= len(self._frames.popleft()[1])

    def acknowledge(self, number: int) -> None:
        """Drop the frames that the other end has taken, all up to ``number``."""
        while self._frames and self._frames[0][0] <= number:
            self.drop_oldest()
