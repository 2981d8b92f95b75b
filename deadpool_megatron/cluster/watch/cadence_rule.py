"""The rate at which state can be protected while training never waits, from measurements. Pure.

Training waits at the commit gate only when copies take longer than the iterations between two due
generations (and the lag is used up). Then each due generation takes as long as its copies, and the
smallest cadence that fits follows from that time and the time of an iteration without waiting. When
nothing waits, that time is not known; then the vaults' figures say how long shipping takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deadpool_megatron.settings import LONGEST_CADENCE

# A verdict needs both; a page fault or a slow moment of the network is no reason for a new epoch.
LEAST_ITERATIONS = 50
LEAST_SECONDS = 30.0
# So many calm stretches in a row before protection becomes denser again.
CALM_STRETCHES = 10
_TOO_MUCH = 0.05  # share of the time in which training waits
_CALM = 0.01
# Room that is left where the cadence is raised, and that has to be there before it is lowered.
_ROOM_UP = 1.1
_ROOM_DOWN = 1.6


@dataclass(frozen=True)
class Stretch:
    """Measurements over some iterations of one epoch.

    ``stall_seconds``: in which training waited for protection. ``ship_seconds``: that the slowest
    role needs for one generation, and ``window_seconds``: that it has for it; 0 when not known.
    """

    iterations: int
    seconds: float
    stall_seconds: float = 0.0
    ship_seconds: float = 0.0
    window_seconds: float = 0.0

    @property
    def is_long(self) -> bool:
        """Return whether something can be concluded from it."""
        return self.iterations >= LEAST_ITERATIONS and self.seconds >= LEAST_SECONDS

    @property
    def share(self) -> float:
        """Part of the time in which training waited."""
        return self.stall_seconds / self.seconds if self.seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """An iteration without waiting."""
        return max(self.seconds - self.stall_seconds, 1e-9) / max(1, self.iterations)


def denser_or_thinner(every: int, stretch: Stretch, calm: int) -> int:
    """The cadence to continue with. ``calm``: stretches in a row, this one included, without
    waits."""
    if not stretch.is_long:
        return every
    if stretch.share > _TOO_MUCH:
        # All of that time copies were under way: so long they take, with all that belongs to them.
        commit = stretch.seconds / stretch.iterations * every
        needed = math.ceil(commit * _ROOM_UP / stretch.step_seconds)
        return min(LONGEST_CADENCE, max(needed, every + 1))
    if calm >= CALM_STRETCHES and stretch.ship_seconds and stretch.window_seconds:
        # The vault's window ends where a gate asks, so it leaves out the end of a step; but it is
        # the narrower one of two figures that counts.
        window = min(stretch.window_seconds / every, stretch.step_seconds)
        return min(every, max(1, math.ceil(stretch.ship_seconds * _ROOM_DOWN / window)))
    return every


def in_words(stretch: Stretch) -> str:
    """Return why: one clause for people."""
    waited = f"training waited {stretch.share:.0%} of the time for copies"
    return f"{waited}, a step without waiting takes {stretch.step_seconds:.2g} s"


class StretchMeter:
    """Collects one stretch after the other from reports of an epoch. Not thread-safe."""

    def __init__(self) -> None:
        self._epoch = 0
        self._skipped: int | None = None
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._waits: dict[int, float] = {}
        self._fits: dict[int, tuple[int, float, float]] = {}
        self.calm = 0
        self.step_seconds: float | None = None

    def step(self, epoch: int, iteration: int, now: float) -> None:
        """An iteration is finished. The first two of an epoch are not counted: they wait for what
        is made once, and for the copies of what was restored."""
        if epoch != self._epoch:
            self._epoch, self._skipped, self.calm = epoch, iteration + 1, 0
            self._begin(None)
        if self._skipped is not None and iteration <= self._skipped:
            return
        if self._first is None:
            self._begin((iteration, now))
        elif iteration > self._last[0]:
            self._last = iteration, now
            self.step_seconds = self.stretch().seconds / self.stretch().iterations

    def waited(self, epoch: int, iteration: int, seconds: float) -> None:
        """Some role waited for the copies of ``iteration``; roles wait side by side."""
        if epoch == self._epoch and self._first is not None:
            self._waits[iteration] = max(seconds, self._waits.get(iteration, 0.0))

    def shipped(self, epoch: int, role: int, ship_seconds: float, window_seconds: float) -> None:
        """A generation of a role is committed; its shipping had this long."""
        if epoch == self._epoch and self._first is not None:
            count, ship, window = self._fits.get(role, (0, 0.0, 0.0))
            self._fits[role] = count + 1, ship + ship_seconds, window + window_seconds

    def stretch(self) -> Stretch:
        """Return what was seen since the present stretch began."""
        if self._first is None:
            return Stretch(0, 0.0)
        iterations, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        means = [(ship / n, window / n) for n, ship, window in self._fits.values()]
        ship, window = max(means, default=(0.0, 0.0))
        return Stretch(iterations, seconds, sum(self._waits.values()), ship, window)

    def look(self, every: int) -> tuple[int, Stretch]:
        """The cadence to continue with, and why; a stretch that was long enough ends with that."""
        stretch = self.stretch()
        if not stretch.is_long:
            return every, stretch
        self.calm = self.calm + 1 if stretch.share < _CALM else 0
        self._begin(self._last)
        return denser_or_thinner(every, stretch, self.calm), stretch

    def _begin(self, first: tuple[int, float] | None) -> None:
        self._first = first
        self._last = first or (0, 0.0)
        self._waits, self._fits = {}, {}
