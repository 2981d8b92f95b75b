"""Findings of the coordinator's looks at its agents: silence, hangs, slow nodes.

Each look answers inputs for the machine; nothing is decided here.
"""

from __future__ import annotations

import math
import time
from typing import Any

from deadpool_megatron.cluster.coordinator.reporting.status import role_beats
from deadpool_megatron.cluster.coordinator.watchdog.protection_watch import ProtectionWatch
from deadpool_megatron.cluster.coordinator.watchdog.slow_nodes import (
    SlowNodes,
    aside_event,
    slow_event,
)
from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.link.pacing import Pace, hang_look_seconds
from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.state.phases import Phase
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.watch.hang import HangLimit, ProgressClock, find_hang
from deadpool_megatron.cluster.watch.hang_table import table_of
from deadpool_megatron.events import Event
from deadpool_megatron.settings import Settings


class Watchdog:
    """Used from the coordinator's loop, but for :meth:`at_progress`, which goes over all roles and
    may be called in one other thread; ``now`` is the monotonic clock, in seconds.
    """

    def __init__(self, settings: Settings, peers: Peers) -> None:
        self._settings = settings
        self._peers = peers
        self._progress = ProgressClock()
        self._hang_limit = HangLimit(settings)
        self._slow_nodes = SlowNodes(settings)
        self._protection = ProtectionWatch(settings)
        self._pace = Pace(hang_look_seconds(settings))

    def at_silence(self, now: float, *, trusted: bool) -> list[inputs.NodeLost]:
        """Nodes whose agents have been silent for too long, which are forgotten with that.

        ``trusted``: whether everybody could see that this coordinator lives; otherwise nodes
        continue without it, and a silence proves nothing (see agent/fence.py).
        """
        limit = self._settings.node_silence_seconds if trusted else math.inf
        for peer in self._peers.silent(limit / 2, now):
            peer.ping()
        found = []
        for peer in self._peers.silent(limit, now):
            silent = now - peer.heard_at
            cut = peer.undelivered_bytes() > 0
            kind = FailureKind.NODE_CUT if cut else FailureKind.NODE_FROZEN
            how = "and nothing is received there" if cut else "but it receives what is sent"
            self._peers.forget(peer)
            found.append(
                inputs.NodeLost(peer.node, f"silent for {silent:.1f} s, {how}", silent, kind)
            )
        return found

    def is_due(self, now: float) -> bool:
        """Return whether it is time for the next look at the progress of all roles."""
        return self._pace.is_due(now)

    def at_progress(
        self, state: State, epoch: int, now: float
    ) -> tuple[list[Event], list[inputs.Input]]:
        """Events to write and inputs to feed. Raises LookupError, TypeError, ValueError or
        AttributeError for beats of members that cannot be understood.
        """
        events: list[Event] = []
        found: list[inputs.Input] = []
        hang, verdicts = self._hang(state, now), self._slow_nodes.look(state, self._peers, now)
        if hang is not None:
            found.append(hang)
        events += [slow_event(epoch, verdict) for verdict in verdicts]
        if (moved := self._slow_nodes.to_move(state)) is not None:
            events.append(aside_event(epoch, moved))
            found.append(inputs.DrainRequested(moved.node))
        return events, found

    def at_protection(self, state: State) -> list[inputs.Input]:
        """Inputs to feed for what steps and waits say about the cadence."""
        return self._protection.look(state)

    def note(self, event: Event) -> None:
        """Take what an event says about the pace of training and its protection."""
        self._protection.note(event, time.monotonic())

    def describe(self, state: State) -> dict[str, Any]:
        """Return what ``deadpool status`` shows of it: ``slow`` nodes, and the ``rpo``."""
        return {
            "slow": self._slow_nodes.describe(),
            "rpo": self._protection.describe(state),
        }

    def _hang(self, state: State, now: float) -> inputs.RolesHung | None:
        record = state.record
        if record is None or state.phase not in (Phase.RUNNING, Phase.PAUSING):
            self._hang_limit.forget_step()
            return None
        beats = role_beats(state, self._peers)
        if len(beats) != len(record.seats):
            return None
        statuses = self._progress.update(beats, now)
        self._hang_limit.look(statuses, now)
        hang = find_hang(statuses, self._settings, self._hang_limit.seconds)
        if hang is None:
            return None
        self._hang_limit.was_reached(hang.still_seconds)
        return inputs.RolesHung(record.epoch, hang.culprits, hang.cause, table_of(statuses))
