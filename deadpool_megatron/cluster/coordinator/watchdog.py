"""Findings of looking at agents and roles again and again: silence, hangs, slow nodes, cadence.

Each look answers inputs for the machine; nothing is decided here: the machine takes a request or
refuses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.link.pacing import RateLimiter, hang_look_seconds
from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.chosen_plan import max_lost_by
from deadpool_megatron.cluster.machine.membership import exposed_roles
from deadpool_megatron.cluster.machine.state import Phase, State
from deadpool_megatron.cluster.watch import windows
from deadpool_megatron.cluster.watch.hang import HangLimit, ProgressClock, find_hang, table_of
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.failures import FailureKind
from deadpool_megatron.layout import schemes
from deadpool_megatron.settings import Settings


class Watchdog:
    """Used from the coordinator's loop; ``now`` is the monotonic clock, in seconds."""

    def __init__(self, settings: Settings, peers: Peers) -> None:
        self._settings = settings
        self._peers = peers
        self._progress = ProgressClock()
        self._hang_limit = HangLimit(settings)
        self._pace = RateLimiter(hang_look_seconds(settings))
        self._slowness = windows.SlownessWatch()
        self._meter = windows.StretchMeter()

    def at_silence(self, quiet: list[AgentPeer], now: float) -> list[inputs.NodeLost]:
        """Of the agents that have been silent for a while the nodes that were for too long, which
        are forgotten with that (see agent/fence.py)."""
        found = []
        for peer in quiet:
            peer.ping()
            silent = now - peer.last_seen
            if silent <= self._settings.node_silence_seconds:
                continue
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
        beats = role_beats(state, self._peers)
        hang = self._hang(state, beats, now)
        found: list[inputs.Input] = [] if hang is None else [hang]
        events = [_slow_event(epoch, verdict) for verdict in self._slow(state, beats)]
        if (moved := self._to_move(state)) is not None:
            events.append(_aside_event(epoch, moved))
            found.append(inputs.DrainRequested(moved.node))
        return events, found

    def note(self, report: Event, now: float) -> None:
        """Take what a report says about steps, waits at the gate and shipping."""
        data, iteration = report.data, report.iteration
        if iteration is None:
            return
        if report.kind is Kind.STEP:
            self._meter.step(report.epoch, iteration, now)
        elif report.kind is Kind.GATE_WAIT and data.get("over"):
            self._meter.waited(report.epoch, iteration, float(data["seconds"]))
        elif report.kind is Kind.COMMITTED and report.role is not None:
            ship, window = data.get("ship_seconds"), data.get("window_seconds")
            if ship is not None and window is not None:
                self._meter.shipped(report.epoch, report.role, float(ship), float(window))

    def at_protection(self, state: State) -> list[inputs.Input]:
        """Return a request for another cadence when one is due."""
        plan = state.protection.plan
        if state.phase is not Phase.RUNNING or state.record is None or plan != _in_force(state):
            return []
        every, stretch = self._meter.look(plan.every)
        fixed = self._settings.cadence != "auto" or schemes.recomputes(plan)
        if every == plan.every or fixed:
            return []
        return [inputs.ProtectionRequested(replace(plan, every=every), windows.in_words(stretch))]

    def describe(self, state: State) -> dict[str, Any]:
        """Return what ``deadpool status`` shows of it: ``slow``, which is node -> how slow it is in
        seconds per iteration, and the ``rpo``: the plan in force, the one that is wanted, and what
        is lost at most; None while a role has fewer copies than wanted: perhaps all since the last
        checkpoint."""
        plan, wanted = _in_force(state), state.protection.plan
        lost = max_lost_by(plan, state.memory.layouts.values(), self._settings)
        step, holds = self._meter.step_seconds, not exposed_roles(state)
        return {
            "slow": {
                str(node): {"seconds": found.seconds, "peer_seconds": found.peer_seconds}
                for node, found in sorted(self._slowness.slow.items())
            },
            "rpo": {
                "plan": schemes.format_plan(plan),
                "wanted": "" if plan == wanted else schemes.format_plan(wanted),
                "every": plan.every,
                "survives": schemes.losses_survived(self._settings, plan),
                "most_lost": lost if holds else None,
                "most_lost_seconds": lost * step if holds and step is not None else None,
            },
        }

    def _hang(
        self, state: State, beats: dict[int, dict[str, Any]], now: float
    ) -> inputs.RolesHung | None:
        record = state.record
        if record is None or state.phase not in (Phase.RUNNING, Phase.PAUSING):
            self._hang_limit.forget_step()
            return None
        if len(beats) != len(record.seats):
            return None
        statuses = self._progress.update(beats, now)
        self._hang_limit.look(statuses, now)
        hang = find_hang(statuses, self._settings, self._hang_limit.seconds)
        if hang is None:
            return None
        self._hang_limit.was_reached(hang.still_seconds)
        verdict = (hang.culprits, hang.cause, table_of(statuses), hang.still_seconds)
        return inputs.RolesHung(record.epoch, *verdict)

    def _slow(self, state: State, beats: dict[int, dict[str, Any]]) -> list[windows.Slowness]:
        """Return what has changed about slow nodes."""
        if state.phase is not Phase.RUNNING or state.record is None:
            return []
        players = {}
        for role, beat in beats.items():
            own, layout = beat.get("own"), state.memory.layouts.get(role)
            if own is None or layout is None:
                return []  # all of them are compared, or none
            time_used = windows.OwnTime(int(own[0]), float(own[1]))
            players[role] = windows.Player(state.seats[role].node, layout.peers, time_used)
        if len(players) != len(state.record.seats):
            return []
        return self._slowness.look(state.record.epoch, players)

    def _to_move(self, state: State) -> windows.Slowness | None:
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
        slow = [found for node, found in self._slowness.slow.items() if node in state.seats.nodes]
        return max(slow, key=lambda found: found.factor, default=None)


def role_beats(state: State, peers: Peers) -> dict[int, dict[str, Any]]:
    """Newest beat of the very process that plays each role; roles without one are missing."""
    found = {}
    for role, seat in sorted(state.seats.items()):
        peer = peers.agents.get(seat.node)
        beat = {} if peer is None else peer.beats.get(seat.local_rank, {})
        if beat.get("incarnation") == seat.incarnation and "section" in beat:
            found[role] = beat
    return found


def _in_force(state: State) -> schemes.ProtectionPlan:
    return state.protection.plan if state.record is None else state.record.protection


def _slow_event(epoch: int, verdict: windows.Slowness) -> Event:
    """The event that tells of a verdict."""
    data = {
        "kind": str(FailureKind.SLOW_NODE),
        "seconds": verdict.seconds,
        "peer_seconds": verdict.peer_seconds,
        "factor": verdict.factor,
        "over": verdict.over,
    }
    return Event(Kind.SLOW_NODE, epoch, verdict.node, verdict.role, data=data)


def _aside_event(epoch: int, verdict: windows.Slowness) -> Event:
    """The event that its roles go to a spare: the host is not for the next run either."""
    text = f"{verdict.seconds:.3f} s of its own per iteration, its peers {verdict.peer_seconds:.3f}"
    cause = f"node {verdict.node} is quarantined, it is slow: {text} s"
    data = {"cause": cause, "kind": str(FailureKind.SLOW_NODE)}
    return Event(Kind.NODE_QUARANTINED, epoch, verdict.node, data=data)
