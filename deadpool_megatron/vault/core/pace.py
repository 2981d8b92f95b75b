"""The pace of a generation's bytes: they go as soon as a share of the link allows. Pure.

A node that is lost before its newest generation has left costs the iterations since the one before,
so copies leave early: at once while training does not use the link (:mod:`.link_use`). While it
does they go evenly, at no more than their share of it (FFTrainer sends in idle gaps; REFT calls its
kind HAS), and hurry when a gate comes near. Where nobody knows when training sends they go evenly
all the time; if their share would take longer than the first half of the time there is, they take
what the half requires. That time is learned from past generations: from the seal until somebody
waits for it, or until the next one is sealed. Holding back is a courtesy and ends at once where it
would cost anything: see :class:`Window`.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from deadpool_megatron.layout.records import Generation

# Of the time there is, at most, where nobody knows when training sends. Data-parallel training
# reduces gradients in the second half of an iteration; what is sent before that is in nobody's way,
# and uneven iterations have their room.
SHARE = 0.5
# The same where copies find the gaps of training's traffic. The rest is left for uneven iterations,
# and for training that sends all the time: then who hurries gets half of the link.
LATEST = 0.7
# So few are not a norm yet: full speed until then.
_LEAST_INTERVALS = 3
# Of so many the median is taken: some evaluations and saves among them do not move it.
_MOST_INTERVALS = 15
# A gate that was found shut tells how much of an iteration there really is. So many iterations are
# tried with it before the whole iteration is tried again.
_GATE_ITERATIONS = 64
_MOST_GATES = 5
_MOST_SEALS = 16
# One piece takes about so long at the rate in force, within limits: even, but few turns of a thread
# that has to wait for the interpreter (with 2 ms they cost as much as the bytes).
_PIECE_SECONDS = 0.016
_LEAST_PIECE_BYTES = 64 << 10
# Slower than this is in nobody's way either, but who receives would take a
# connection for dead on which no piece comes for tens of seconds.
_LEAST_RATE = 1 << 20
_BITS = 8
_NANOSECONDS = 1_000_000_000


class Window:
    """Knowledge of the time that generations of one role have. Not thread-safe.

    ``now`` is monotonic time in seconds.
    """

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=_MOST_INTERVALS)
        self._gates: deque[tuple[int, float]] = deque(maxlen=_MOST_GATES)
        self._seals: dict[Generation, float] = {}
        self._newest: Generation | None = None
        self._waiting: tuple[Generation, float] | None = None
        self._hurried: Generation | None = None
        self._committed: Generation | None = None
        self._stall_seconds = 0.0

    def sealed(self, generation: Generation, now: float) -> None:
        """A generation lies whole in the own node's memory."""
        last, self._newest = self._newest, generation
        if last is not None and last < generation and last.lineage == generation.lineage:
            # What the gate held up is no time that training needs.
            self._intervals.append(max(0.0, now - self._seals[last] - self._stall_seconds))
        self._stall_seconds = 0.0
        self._seals[generation] = now
        while len(self._seals) > _MOST_SEALS:
            del self._seals[next(iter(self._seals))]

    def waits(self, generation: Generation, now: float) -> None:
        """The role's member stands at its gate until ``generation`` is committed."""
        self._hurried = generation
        if self._committed is not None and generation <= self._committed:
            return  # its word has crossed ours, or it waits for extras that came later
        self._waiting = generation, now
        if len(self._intervals) >= _LEAST_INTERVALS:  # before, nothing was held back
            self._gates.append((generation.iteration, now - self._seals.get(generation, now)))

    def committed(self, generation: Generation, now: float) -> None:
        """``generation`` is committed, and whoever waited for it continues."""
        self._committed = generation
        if self._waiting is not None and self._waiting[0] <= generation:
            self._stall_seconds += now - self._waiting[1]
            self._waiting = None

    def seconds_since_seal(self, generation: Generation, now: float) -> float | None:
        """Return how long ago a generation was sealed here; None when it was not, or long ago."""
        sealed = self._seals.get(generation)
        return None if sealed is None else now - sealed

    def seconds(self) -> float | None:
        """The time there is for one generation; None while too little has been seen."""
        if len(self._intervals) < _LEAST_INTERVALS or self._newest is None:
            return None
        usual = statistics.median(self._intervals)
        oldest = self._newest.iteration - _GATE_ITERATIONS
        gates = [seconds for iteration, seconds in self._gates if iteration > oldest]
        return min(usual, statistics.median(gates)) if gates else usual

    def is_late(self, generation: Generation) -> bool:
        """True when somebody waits for the generation, or a newer one is there to be shipped."""
        awaited = self._hurried is not None and generation <= self._hurried
        return awaited or (self._newest is not None and generation < self._newest)

    def schedule(
        self, generation: Generation, nbytes: int, allowed: Allowed, *, fills_gaps: bool
    ) -> Schedule | None:
        """Returns how ``nbytes`` of a generation are spread while training sends, or may do so;
        None: at full speed.
        """
        seconds, sealed = self.seconds(), self._seals.get(generation)
        if sealed is None or not seconds or not nbytes:
            return None
        even = nbytes / max(allowed.share * allowed.link, _LEAST_RATE)
        if not fills_gaps or not allowed.link:
            return Schedule(sealed, min(SHARE * seconds, even), nbytes)
        hurry = Hurry(sealed + LATEST * seconds, allowed.link)
        return Schedule(sealed, even, nbytes, hurry)


@dataclass(frozen=True)
class Allowed:
    """``link``: the part of the node's link that there is for one shipment, in bytes per second (0:
    not known). ``share``: how much of it may be taken while training sends."""

    link: float
    share: float


@dataclass(frozen=True)
class Hurry:
    """All is to be there at ``end`` (monotonic); ``bytes_per_second`` are what the link has."""

    end: float
    bytes_per_second: float


@dataclass(frozen=True)
class Schedule:
    """``nbytes`` evenly from ``begin`` (monotonic) on, over ``seconds``; what is late may go, and
    what would come too late otherwise."""

    begin: float
    seconds: float
    nbytes: int
    hurry: Hurry | None = None

    def delay_seconds(self, sent_bytes: int, now: float) -> float:
        """Return how long the byte after the first ``sent_bytes`` has to wait; 0 or less: not at
        all."""
        due = self.begin + self.seconds * sent_bytes / self.nbytes
        if self.hurry is not None:
            left = self.nbytes - sent_bytes
            due = min(due, self.hurry.end - left / self.hurry.bytes_per_second)
        return due - now

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


class TokenBucket:
    """A hard limit: in any time t no more than ``burst_bytes`` + rate * t bytes are let through.

    Exact to the nanosecond, by integers only (10^9 times bits). Not thread-safe. The generic cell
    rate algorithm, as reservations: who takes is told how long to wait, whoever comes later waits
    behind him.
    """

    def __init__(self, bits_per_second: int, burst_bytes: int) -> None:
        self.bits_per_second = bits_per_second
        self.burst_bytes = burst_bytes
        self._full = burst_bytes * _BITS * _NANOSECONDS
        self._level = self._full
        self._last_ns: int | None = None

    def take(self, nbytes: int, now_ns: int) -> int:
        """Reserve; the caller sends after so many nanoseconds. Raises ValueError for more than a
        burst at once, which could not be let through without breaking the limit."""
        if nbytes > self.burst_bytes:
            raise ValueError(f"{nbytes} bytes at once, with a burst of {self.burst_bytes}")
        last = now_ns if self._last_ns is None else self._last_ns
        passed_ns = max(0, now_ns - last)
        self._last_ns = max(now_ns, last)
        self._level = min(self._full, self._level + passed_ns * self.bits_per_second)
        self._level -= nbytes * _BITS * _NANOSECONDS
        return max(0, -(self._level // self.bits_per_second)) + self._last_ns - now_ns


def piece_bytes(rate: float | None, most_bytes: int) -> int:
    """Bytes that go at once at a rate (bytes per second; None: full speed)."""
    if rate is None:
        return most_bytes
    return min(most_bytes, max(_LEAST_PIECE_BYTES, int(rate * _PIECE_SECONDS)))
