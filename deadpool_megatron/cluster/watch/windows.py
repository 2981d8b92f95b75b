"""Verdicts from stretches of iterations: nodes that are much slower than their peers, and the
cadence of protected generations. Pure.

The iterations of all roles take equally long, because they wait for each other. They differ in the
time in which a role does *not* wait. Only data-parallel peers on different nodes are compared,
because they have the same work, while stages of a pipeline do not.

Training waits at the commit gate only if copies take longer than the iterations between two due
generations (and the lag is used up). Then each due generation takes as long as its copies, and the
smallest cadence that fits follows from that time and the time of an iteration without waiting. If
training does not wait, the time of the copies is unknown, and the vaults' figures are used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_megatron.settings import LONGEST_CADENCE

# A verdict on a slow node needs many short windows in a row, because a slow node is slow in each of
# them, while a pause of any length (a garbage collection, a file system) affects a single window.
WINDOW_ITERATIONS = 4
WINDOWS = 6
# A slow node takes more than this many times as long as its peers.
SLOW_FACTOR = 1.3
# Differences below this are noise of the clock and of the scheduler.
_MIN_SECONDS = 0.005
# A verdict on the cadence needs both, because a page fault or a slow moment of the network is no
# reason for a new epoch.
MIN_ITERATIONS = 50
MIN_SECONDS = 30.0
# This many stretches in a row must be nearly without waits before the cadence is lowered again.
CALM_STRETCHES = 10
# The cadence is raised if training waits for more than this share of the time.
_MAX_SHARE = 0.05
# A stretch is nearly without waits if training waits for less than this share of the time.
_CALM_SHARE = 0.01
# Margin that is left when the cadence is raised, and that must exist before it is lowered.
_MARGIN_UP = 1.1
_MARGIN_DOWN = 1.6


@dataclass(frozen=True)
class OwnTime:
    """The finished iterations of a role since its epoch began, and their total seconds without the
    time in which the role waited for others."""

    iterations: int
    seconds: float


@dataclass(frozen=True)
class ComparedRole:
    """A role in the comparison: its node, and its data-parallel group, itself included."""

    node: int
    peers: tuple[int, ...]
    own: OwnTime


@dataclass(frozen=True)
class Slowness:
    """The verdict that a node has become slow, or (``over``) is no longer slow. ``seconds``: the
    time of its slowest role in an iteration; ``peer_seconds``: the median of that role's peers on
    other nodes."""

    node: int
    role: int
    seconds: float
    peer_seconds: float
    over: bool = False

    @property
    def factor(self) -> float:
        """Return the ratio of the role's time to that of its peers."""
        return self.seconds / max(self.peer_seconds, 1e-9)


class SlownessWatch:
    """State of the comparison: the start of each window, and the slow nodes. Not thread-safe."""

    def __init__(self, factor: float = SLOW_FACTOR) -> None:
        self._factor = factor
        self._epoch = 0
        self._began: dict[int, OwnTime] = {}
        self._slow_windows: dict[int, int] = {}  # node -> slow windows in a row
        # The verdicts on nodes that are slow now.
        self.slow: dict[int, Slowness] = {}

    def look(self, epoch: int, compared: Mapping[int, ComparedRole]) -> list[Slowness]:
        """Return the new verdicts, given all roles of the open epoch. There are none until a window
        is full."""
        if epoch != self._epoch or self._began.keys() != compared.keys():
            self._epoch = epoch
            self._begin(compared)
            nodes = {entry.node for entry in compared.values()}
            self.slow = {n: verdict for n, verdict in self.slow.items() if n in nodes}
            return []
        if any(
            entry.own.iterations - self._began[role].iterations < WINDOW_ITERATIONS
            for role, entry in compared.items()
        ):
            return []
        per_iteration = {role: _mean(self._began[role], p.own) for role, p in compared.items()}
        self._begin(compared)
        return self._judge(_worst_of_nodes(compared, per_iteration))

    def _begin(self, compared: Mapping[int, ComparedRole]) -> None:
        self._began = {role: entry.own for role, entry in compared.items()}

    def _judge(self, worst: Mapping[int, Slowness]) -> list[Slowness]:
        verdicts: list[Slowness] = []
        for node, new in sorted(worst.items()):
            excess = new.seconds - new.peer_seconds
            if excess < _MIN_SECONDS or new.factor <= self._factor:
                self._slow_windows.pop(node, None)
                if self.slow.pop(node, None) is not None:
                    over = Slowness(node, new.role, new.seconds, new.peer_seconds, over=True)
                    verdicts.append(over)
                continue
            self._slow_windows[node] = self._slow_windows.get(node, 0) + 1
            if self._slow_windows[node] >= WINDOWS:
                if node not in self.slow:
                    verdicts.append(new)
                self.slow[node] = new
        return verdicts


def _mean(began: OwnTime, now: OwnTime) -> float:
    return (now.seconds - began.seconds) / (now.iterations - began.iterations)


def _worst_of_nodes(
    compared: Mapping[int, ComparedRole], per_iteration: Mapping[int, float]
) -> dict[int, Slowness]:
    """Return each node's slowest role relative to its peers; omit nodes whose roles lack peers."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for role, entry in compared.items():
        groups.setdefault(entry.peers, []).append(role)
    worst: dict[int, Slowness] = {}
    for roles in groups.values():
        medians: dict[int, float] = {}  # node -> median of the roles on all other nodes
        for role in roles:
            node = compared[role].node
            if node not in medians:
                others = [per_iteration[peer] for peer in roles if compared[peer].node != node]
                medians[node] = statistics.median(others) if others else math.inf
            verdict = Slowness(node, role, per_iteration[role], medians[node])
            if node not in worst or verdict.factor > worst[node].factor:
                worst[node] = verdict
    return {node: verdict for node, verdict in worst.items() if verdict.peer_seconds < math.inf}


@dataclass(frozen=True)
class Stretch:
    """Measurements over some iterations of one epoch.

    ``stall_seconds``: how long training waited for protection. ``ship_seconds``: how long the
    slowest role takes to ship a generation, and ``window_seconds``: how long it may take; 0 if
    unknown.
    """

    iterations: int
    seconds: float
    stall_seconds: float = 0.0
    ship_seconds: float = 0.0
    window_seconds: float = 0.0

    @property
    def is_long(self) -> bool:
        """Return whether the stretch is long enough for a verdict."""
        return self.iterations >= MIN_ITERATIONS and self.seconds >= MIN_SECONDS

    @property
    def share(self) -> float:
        """Return the share of the time in which training waited."""
        return self.stall_seconds / self.seconds if self.seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Return the time of an iteration without waiting."""
        return max(self.seconds - self.stall_seconds, 1e-9) / max(1, self.iterations)


def next_cadence(every: int, stretch: Stretch, calm: int) -> int:
    """Return the cadence to continue with. ``calm``: number of stretches in a row that were nearly
    without waits, including ``stretch``."""
    if not stretch.is_long:
        return every
    if stretch.share > _MAX_SHARE:
        # Copies were in progress all the time, so the time between two due generations is their
        # duration, with all overheads.
        commit = stretch.seconds / stretch.iterations * every
        needed = math.ceil(commit * _MARGIN_UP / stretch.step_seconds)
        return min(LONGEST_CADENCE, max(needed, every + 1))
    if calm >= CALM_STRETCHES and stretch.ship_seconds and stretch.window_seconds:
        # The smaller figure counts. The vault's window ends when the gate asks for the generation,
        # so it does not include the end of a step.
        window = min(stretch.window_seconds / every, stretch.step_seconds)
        return min(every, max(1, math.ceil(stretch.ship_seconds * _MARGIN_DOWN / window)))
    return every


def cadence_reason(stretch: Stretch) -> str:
    """Return the reason for a new cadence: a clause for people."""
    waited = f"training waited {stretch.share:.0%} of the time for copies"
    return f"{waited}, a step without waiting takes {stretch.step_seconds:.2g} s"


class StretchMeter:
    """Meter of consecutive stretches, from the reports of an epoch. ``calm``: the stretches in a
    row that were nearly without waits. Not thread-safe."""

    def __init__(self) -> None:
        self._epoch = 0
        self._skipped: int | None = None
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._waits: dict[int, float] = {}
        # Role -> number of shipments, and sums of their times and windows.
        self._shipments: dict[int, tuple[int, float, float]] = {}
        self.calm = 0
        self.step_seconds: float | None = None

    def step(self, epoch: int, iteration: int, now: float) -> None:
        """Note a finished iteration. The first two of an epoch are not counted: they wait for
        one-time work, and for the copies of the restored state."""
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
        """Note a role's wait for the copies of ``iteration``; roles wait in parallel."""
        if epoch == self._epoch and self._first is not None:
            self._waits[iteration] = max(seconds, self._waits.get(iteration, 0.0))

    def shipped(self, epoch: int, role: int, ship_seconds: float, window_seconds: float) -> None:
        """Note the time for shipping a committed generation of a role, and its window."""
        if epoch == self._epoch and self._first is not None:
            count, ship, window = self._shipments.get(role, (0, 0.0, 0.0))
            self._shipments[role] = count + 1, ship + ship_seconds, window + window_seconds

    def stretch(self) -> Stretch:
        """Return the measurements since the present stretch began."""
        if self._first is None:
            return Stretch(0, 0.0)
        iterations, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        means = [(ship / n, window / n) for n, ship, window in self._shipments.values()]
        ship, window = max(means, default=(0.0, 0.0))
        return Stretch(iterations, seconds, sum(self._waits.values()), ship, window)

    def look(self, every: int) -> tuple[int, Stretch]:
        """Return the cadence to continue with, and the stretch that shows it. If the stretch is
        long enough for a verdict, begin the next stretch."""
        stretch = self.stretch()
        if not stretch.is_long:
            return every, stretch
        self.calm = self.calm + 1 if stretch.share < _CALM_SHARE else 0
        self._begin(self._last)
        return next_cadence(every, stretch, self.calm), stretch

    def _begin(self, first: tuple[int, float] | None) -> None:
        self._first = first
        self._last = first or (0, 0.0)
        self._waits, self._shipments = {}, {}
