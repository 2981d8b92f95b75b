"""From beats to verdicts about slow nodes, and what is done about them."""

from __future__ import annotations

from typing import Any

from deadpool_megatron.cluster.coordinator.reporting.status import role_beats
from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine.state.phases import Phase
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.watch.slowness import OwnTime, Player, Slowness, SlownessWatch
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.settings import Settings

_PERIOD_SECONDS = 0.5


class SlowNodes:
    """Looks at the beats now and then. Used from the coordinator's loop only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watch = SlownessWatch(settings.slow_factor)
        self._due = 0.0

    def look(self, state: State, peers: Peers, now: float) -> list[Slowness]:
        """Return what has changed; ``now``: monotonic, seconds."""
        if now < self._due or state.phase is not Phase.RUNNING or state.record is None:
            return []
        self._due = now + _PERIOD_SECONDS
        players = _players(state, peers)
        if len(players) != len(state.record.seats):
            return []
        return self._watch.look(state.record.epoch, players)

    def to_move(self, state: State) -> Slowness | None:
        """The slowest node whose roles shall go to a spare now: wanted, and a good one is there.
        Asked again and again, so that the first spare to come is for it. One node at a time.
        """
        fleet = state.fleet
        taken = state.seats.nodes | fleet.aside
        if (
            self._settings.evict_slow != "on"
            or state.phase is not Phase.RUNNING
            or fleet.drains
            or set(fleet.nodes) <= taken
        ):
            return None
        slow = [found for node, found in self._watch.slow.items() if node in state.seats.nodes]
        return max(slow, key=lambda found: found.factor, default=None)

    def describe(self) -> dict[str, Any]:
        """For the status: node -> how slow it is, in seconds per iteration."""
        return {
            str(node): {"seconds": found.seconds, "peer_seconds": found.peer_seconds}
            for node, found in sorted(self._watch.slow.items())
        }


def slow_event(epoch: int, verdict: Slowness) -> Event:
    """The event that tells of a verdict."""
    data = {
        "kind": str(FailureKind.SLOW_NODE),
        "seconds": verdict.seconds,
        "peer_seconds": verdict.peer_seconds,
        "factor": verdict.factor,
        "over": verdict.over,
    }
    return Event(Kind.SLOW_NODE, epoch, verdict.node, verdict.role, data=data)


def aside_event(epoch: int, verdict: Slowness) -> Event:
    """The event that its roles go to a spare: the host is not for the next run either."""
    text = f"{verdict.seconds:.3f} s of its own per iteration, its peers {verdict.peer_seconds:.3f}"
    cause = f"node {verdict.node} is put aside, it is slow: {text} s"
    data = {"cause": cause, "kind": str(FailureKind.SLOW_NODE)}
    return Event(Kind.NODE_ASIDE, epoch, verdict.node, data=data)


def _players(state: State, peers: Peers) -> dict[int, Player]:
    """The roles whose beats say what they need of their own."""
    found = {}
    for role, beat in role_beats(state, peers).items():
        own, layout = beat.get("own"), state.memory.layouts.get(role)
        if own is not None and layout is not None:
            time_used = OwnTime(int(own[0]), float(own[1]))
            found[role] = Player(state.seats[role].node, layout.peers, time_used)
    return found
