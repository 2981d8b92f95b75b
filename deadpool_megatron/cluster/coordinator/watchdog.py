"""Findings of periodic checks of agents and roles: silence, hangs, slow nodes, cadence.

Each check returns inputs for the machine. Nothing is decided here: the machine accepts a request or
refuses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.link.message_limits import RateLimiter, hang_look_seconds
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
    """Checks of agents and roles, for the coordinator's loop; ``now``: monotonic seconds."""

    def __init__(self, settings: Settings, peers: Peers) -> None:
        self._settings = settings
        self._peers = peers
        self._progress = ProgressClock()
        self._hang_limit = HangLimit(settings)
        self._pace = RateLimiter(hang_look_seconds(settings))
        self._slowness = windows.SlownessWatch()
        self._meter = windows.StretchMeter()

    def at_silence(self, quiet: list[AgentPeer], now: float) -> list[inputs.NodeLost]:
        """Ping the ``quiet`` agents. Return the nodes of the agents that have been silent for too
        long, and forget these agents (see agent/fence.py)."""
        lost = []
        for peer in quiet:
            peer.ping()
            silent = now - peer.last_seen
            if silent <= self._settings.node_silence_seconds:
                continue
            is_cut = peer.undelivered_bytes() > 0
            kind = FailureKind.NODE_CUT if is_cut else FailureKind.NODE_FROZEN
            detail = "and nothing is received there" if is_cut else "but it receives what is sent"
            self._peers.forget(peer)
            lost.append(
                inputs.NodeLost(peer.node, f"silent for {silent:.1f} s, {detail}", silent, kind)
            )
        return lost

    def is_due(self, now: float) -> bool:
        """Return whether it is time for the next check of the progress of all roles."""
        return self._pace.is_due(now)

    def at_progress(
        self, state: State, epoch: int, now: float
    ) -> tuple[list[Event], list[inputs.Input]]:
        """Return events to write and inputs to feed. Raises LookupError, TypeError, ValueError or
        AttributeError for malformed beats of members.
        """
        beats = role_beats(state, self._peers)
        hang = self._hang(state, beats, now)
        items: list[inputs.Input] = [] if hang is None else [hang]
        events = [_slow_event(epoch, verdict) for verdict in self._slow(state, beats)]
        if (verdict := self._slowest_to_drain(state)) is not None:
            events.append(_quarantine_event(epoch, verdict))
            items.append(inputs.DrainRequested(verdict.node))
        return events, items

    def note(self, report: Event, now: float) -> None:
        """Take the times of steps, waits at the gate and shipping from a report."""
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
        """Return a request for another cadence when it is due."""
        plan = state.protection.plan
        if state.phase is not Phase.RUNNING or state.record is None or plan != _in_force(state):
            return []
        every, stretch = self._meter.look(plan.every)
        if every == plan.every or self._settings.cadence != "auto":
            return []
        reason = windows.cadence_reason(stretch)
        return [inputs.ProtectionRequested(replace(plan, every=every), reason)]

    def describe(self, state: State) -> dict[str, Any]:
        """Return this part of ``deadpool status``: ``slow``, which maps a node to its seconds per
        iteration, and ``rpo``: the plan in force, the wanted plan, and the maximum loss. The loss
        is None while a role has fewer copies than wanted, as then all iterations since the last
        checkpoint may be lost."""
        plan, wanted = _in_force(state), state.protection.plan
        lost = max_lost_by(plan, state, self._settings)
        step, holds = self._meter.step_seconds, not exposed_roles(state)
        return {
            "slow": {
                str(node): {"seconds": verdict.seconds, "peer_seconds": verdict.peer_seconds}
                for node, verdict in sorted(self._slowness.slow.items())
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
        self._hang_limit.note_hang(hang.still_seconds)
        verdict = (hang.culprits, hang.cause, table_of(statuses), hang.still_seconds)
        return inputs.RolesHung(record.epoch, *verdict)

    def _slow(self, state: State, beats: dict[int, dict[str, Any]]) -> list[windows.Slowness]:
        """Return the changes of the verdicts on slow nodes."""
        if state.phase is not Phase.RUNNING or state.record is None:
            return []
        compared = {}
        for role, beat in beats.items():
            own, layout = beat.get("own"), state.memory.layouts.get(role)
            if own is None or layout is None:
                return []  # the comparison needs all roles
            own_time = windows.OwnTime(int(own[0]), float(own[1]))
            compared[role] = windows.ComparedRole(state.seats[role].node, layout.peers, own_time)
        if len(compared) != len(state.record.seats):
            return []
        return self._slowness.look(state.record.epoch, compared)

    def _slowest_to_drain(self, state: State) -> windows.Slowness | None:
        """Return the slowest node, if its roles are to move to a spare now: the setting is on, a
        good spare exists, and no other node is being drained.
        """
        fleet = state.fleet
        unsuitable = state.seats.nodes | fleet.poor_spares
        if (
            self._settings.evict_slow != "on"
            or state.phase is not Phase.RUNNING
            or fleet.drains
            or set(fleet.nodes) <= unsuitable
        ):
            return None
        slow = [slow for node, slow in self._slowness.slow.items() if node in state.seats.nodes]
        return max(slow, key=lambda verdict: verdict.factor, default=None)


def role_beats(state: State, peers: Peers) -> dict[int, dict[str, Any]]:
    """Return the newest beat of the process that holds each role. Roles without a beat are left
    out."""
    beats = {}
    for role, seat in sorted(state.seats.items()):
        peer = peers.agents.get(seat.node)
        beat = {} if peer is None else peer.beats.get(seat.local_rank, {})
        if beat.get("incarnation") == seat.incarnation and "section" in beat:
            beats[role] = beat
    return beats


def _in_force(state: State) -> schemes.ProtectionPlan:
    return state.protection.plan if state.record is None else state.record.protection


def _slow_event(epoch: int, verdict: windows.Slowness) -> Event:
    """Return the event that reports a verdict."""
    data = {
        "kind": str(FailureKind.SLOW_NODE),
        "seconds": verdict.seconds,
        "peer_seconds": verdict.peer_seconds,
        "factor": verdict.factor,
        "over": verdict.over,
    }
    return Event(Kind.SLOW_NODE, epoch, verdict.node, verdict.role, data=data)


def _quarantine_event(epoch: int, verdict: windows.Slowness) -> Event:
    """Return the event of the move to a spare; it excludes the host from the next run too."""
    text = f"{verdict.seconds:.3f} s of its own per iteration, its peers {verdict.peer_seconds:.3f}"
    cause = f"node {verdict.node} is quarantined, it is slow: {text} s"
    data = {"cause": cause, "kind": str(FailureKind.SLOW_NODE)}
    return Event(Kind.NODE_QUARANTINED, epoch, verdict.node, data=data)
