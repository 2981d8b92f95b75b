"""The nodes that are much slower than their peers, from what each role needs of its own. Pure.

The iterations of all roles take equally long, for they wait for each other. What tells them apart
is the time in which a role does *not* wait. Compared are data-parallel peers, because they have the
same work (stages of a pipeline have not), and only with those on other nodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

# A verdict needs many short windows in a row, for a slow node is slow in each of them. One pause,
# however long (a garbage collection, a file system), spoils the mean of one window only.
WINDOW_ITERATIONS = 4
WINDOWS = 6
# Differences below this are noise of the clock and of the scheduler.
_LEAST_SECONDS = 0.005


@dataclass(frozen=True)
class OwnTime:
    """Time that a role has spent without waiting, since its epoch began: finished iterations and
    the seconds of all of them."""

    iterations: int
    seconds: float


@dataclass(frozen=True)
class Player:
    """A role as it is compared: where it sits, and its data-parallel group, itself included."""

    node: int
    peers: tuple[int, ...]
    own: OwnTime


@dataclass(frozen=True)
class Slowness:
    """A node has become slow, or (``over``) is no longer. Per iteration: ``seconds`` of its slowest
    role, ``peer_seconds`` the median of that role's peers on other nodes."""

    node: int
    role: int
    seconds: float
    peer_seconds: float
    over: bool = False

    @property
    def factor(self) -> float:
        """Return how many times as long as its peers."""
        return self.seconds / max(self.peer_seconds, 1e-9)


class SlownessWatch:
    """Remembers where each window began, and which nodes are slow. Not thread-safe."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._epoch = 0
        self._began: dict[int, OwnTime] = {}
        self._suspected: dict[int, int] = {}
        self._slow: dict[int, Slowness] = {}

    @property
    def slow(self) -> Mapping[int, Slowness]:
        """The verdicts about nodes that are slow now."""
        return self._slow

    def look(self, epoch: int, players: Mapping[int, Player]) -> list[Slowness]:
        """Return what has changed, given all roles of the open epoch; nothing until a window is
        full."""
        if epoch != self._epoch or self._began.keys() != players.keys():
            self._epoch = epoch
            self._begin(players)
            nodes = {player.node for player in players.values()}
            self._slow = {n: verdict for n, verdict in self._slow.items() if n in nodes}
            return []
        if any(
            player.own.iterations - self._began[role].iterations < WINDOW_ITERATIONS
            for role, player in players.items()
        ):
            return []
        per_iteration = {role: _mean(self._began[role], p.own) for role, p in players.items()}
        self._begin(players)
        return self._judge(_worst_of_nodes(players, per_iteration))

    def _begin(self, players: Mapping[int, Player]) -> None:
        self._began = {role: player.own for role, player in players.items()}

    def _judge(self, worst: Mapping[int, Slowness]) -> list[Slowness]:
        changed: list[Slowness] = []
        for node, found in sorted(worst.items()):
            behind = found.seconds - found.peer_seconds
            if behind < _LEAST_SECONDS or found.factor <= self._factor:
                self._suspected.pop(node, None)
                if self._slow.pop(node, None) is not None:
                    over = Slowness(node, found.role, found.seconds, found.peer_seconds, over=True)
                    changed.append(over)
                continue
            self._suspected[node] = self._suspected.get(node, 0) + 1
            if self._suspected[node] >= WINDOWS:
                if node not in self._slow:
                    changed.append(found)
                self._slow[node] = found
        return changed


def _mean(began: OwnTime, now: OwnTime) -> float:
    return (now.seconds - began.seconds) / (now.iterations - began.iterations)


def _worst_of_nodes(
    players: Mapping[int, Player], per_iteration: Mapping[int, float]
) -> dict[int, Slowness]:
    """For each node its role that is furthest behind its peers; none where a role has no peers."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for role, player in players.items():
        groups.setdefault(player.peers, []).append(role)
    worst: dict[int, Slowness] = {}
    for roles in groups.values():
        medians: dict[int, float] = {}  # over the roles of all other nodes; one pass for each
        for role in roles:
            node = players[role].node
            if node not in medians:
                others = [per_iteration[peer] for peer in roles if players[peer].node != node]
                medians[node] = statistics.median(others) if others else math.inf
            found = Slowness(node, role, per_iteration[role], medians[node])
            if node not in worst or found.factor > worst[node].factor:
                worst[node] = found
    return {node: found for node, found in worst.items() if found.peer_seconds < math.inf}
