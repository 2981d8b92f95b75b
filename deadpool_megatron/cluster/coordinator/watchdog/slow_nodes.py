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
        """What has changed; ``now``: monotonic, seconds."""
        if now < self._due or state.phase is not Phase.RUNNING or state.record is None:
            return []
        self._due = now + _PERIOD_SECONDS
        players = _players(state, peers)
        if len(players) != len(state.record.seats):
            return []
        return self._watch.look(state.record.epoch, players)

    def is_to_leave(self, verdict: Slowness, state: State) -> bool:
        """Whether the node's roles shall go to a spare: wanted, and a good one is there."""
        taken = {seat.node for seat in state.seats.values()} | state.fleet.aside
        wanted = self._settings.evict_slow == "on" and not verdict.over
        return wanted and bool(set(state.fleet.nodes) - taken)

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


def _players(state: State, peers: Peers) -> dict[int, Player]:
    """The roles whose beats say what they need of their own."""
    found = {}
    for role, beat in role_beats(state, peers).items():
        own, layout = beat.get("own"), state.memory.layouts.get(role)
        if own is not None and layout is not None:
            time_used = OwnTime(int(own[0]), float(own[1]))
            found[role] = Player(state.seats[role].node, layout.peers, time_used)
    return found
