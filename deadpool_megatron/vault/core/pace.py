"""When the bytes of a generation may go: as soon as a share of the link allows. Pure.

A node that is lost before its newest generation has left costs the iterations since the one before,
so copies leave early; but evenly, and they take no more of the link than their share, because
training sends over it as well (FFTrainer sends in idle gaps; REFT calls its kind HAS). Where that
share would take longer than the first half of the time there is, they take what the half requires.
That time is learned from past generations: from the seal until somebody waits for it, or until the
next one is sealed. Holding back is a courtesy and ends at once where it would cost anything: see
:class:`Window`.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from deadpool_megatron.layout.records import Generation

# Of the time there is, at most. Data-parallel training reduces gradients in the second half of an
# iteration; what is sent before that is in nobody's way, and uneven iterations have their room.
SHARE = 0.5
# So few are not a norm yet: full speed until then.
_LEAST_GAPS = 3
# Of so many the median is taken: some evaluations and saves among them do not move it.
_MOST_GAPS = 15
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
    """What is known of the time that generations of one role have. Not thread-safe.

    ``now`` is monotonic time in seconds.
    """

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_MOST_GAPS)
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
            self._gaps.append(max(0.0, now - self._seals[last] - self._stall_seconds))
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
        if len(self._gaps) >= _LEAST_GAPS:  # before, nothing was held back
            self._gates.append((generation.iteration, now - self._seals.get(generation, now)))

    def committed(self, generation: Generation, now: float) -> None:
        """``generation`` is committed, and whoever waited for it goes on."""
        self._committed = generation
        if self._waiting is not None and self._waiting[0] <= generation:
            self._stall_seconds += now - self._waiting[1]
            self._waiting = None

    def seconds(self) -> float | None:
        """The time there is for one generation; None while too little has been seen."""
        if len(self._gaps) < _LEAST_GAPS or self._newest is None:
            return None
        usual = statistics.median(self._gaps)
        oldest = self._newest.iteration - _GATE_ITERATIONS
        gates = [seconds for iteration, seconds in self._gates if iteration > oldest]
        return min(usual, statistics.median(gates)) if gates else usual

    def is_late(self, generation: Generation) -> bool:
        """True when somebody waits for the generation, or a newer one is there to be shipped."""
        awaited = self._hurried is not None and generation <= self._hurried
        return awaited or (self._newest is not None and generation < self._newest)

    def schedule(
        self, generation: Generation, nbytes: int, bytes_per_second: float
    ) -> Schedule | None:
        """How ``nbytes`` of a generation are spread; None: at full speed. ``bytes_per_second``:
        what they may take of the link.
        """
        seconds, sealed = self.seconds(), self._seals.get(generation)
        if sealed is None or not seconds or not nbytes:
            return None
        return Schedule(
            sealed, min(SHARE * seconds, nbytes / max(bytes_per_second, _LEAST_RATE)), nbytes
        )


@dataclass(frozen=True)
class Schedule:
    """``nbytes`` evenly from ``begin`` (monotonic) on, over ``seconds``; what is late may go."""

    begin: float
    seconds: float
    nbytes: int

    def delay_seconds(self, sent_bytes: int, now: float) -> float:
        """How long the byte after the first ``sent_bytes`` has to wait; 0 or less: not at all."""
        return self.begin + self.seconds * sent_bytes / self.nbytes - now

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
