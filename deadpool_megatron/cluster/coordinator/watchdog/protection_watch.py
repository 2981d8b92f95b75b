"""Conclusions from measured protection: requests for other plans, and the RPO in
figures. Nothing is decided here: the machine takes a request or refuses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.protection import most_lost_by
from deadpool_megatron.cluster.machine.state.phases import Phase
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.watch.cadence_rule import StretchMeter, in_words
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout import schemes
from deadpool_megatron.settings import Settings


class ProtectionWatch:
    """Used from the coordinator's loop only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._meter = StretchMeter()

    def note(self, event: Event, now: float) -> None:
        """Take what an event says about steps, waits and shipping; ``now``: monotonic, seconds."""
        data, iteration = event.data, event.iteration
        if iteration is None:
            return
        if event.kind is Kind.STEP:
            self._meter.step(event.epoch, iteration, now)
        elif event.kind is Kind.GATE_WAIT and data.get("over"):
            self._meter.waited(event.epoch, iteration, float(data["seconds"]))
        elif event.kind is Kind.COMMITTED and event.role is not None:
            ship, window = data.get("ship_seconds"), data.get("window_seconds")
            if ship is not None and window is not None:
                self._meter.shipped(event.epoch, event.role, float(ship), float(window))

    def look(self, state: State) -> list[inputs.Input]:
        """Return a request for another cadence when one is due."""
        plan = state.protection.plan
        if state.phase is not Phase.RUNNING or state.record is None or plan != self._told(state):
            return []
        every, stretch = self._meter.look(plan.every)
        fixed = self._settings.cadence != "auto" or schemes.recomputes(plan)
        if every == plan.every or fixed:
            return []
        why = in_words(stretch)
        return [inputs.ProtectionRequested(replace(plan, every=every), why)]

    def describe(self, state: State) -> dict[str, Any]:
        """For the status: the plan in force in words, the one that is wanted, and the RPO."""
        plan = self._told(state)
        lost = most_lost_by(plan, state.memory.layouts.values(), self._settings)
        step = self._meter.step_seconds
        return {
            "plan": schemes.plan_in_words(plan),
            "wanted": ""
            if plan == state.protection.plan
            else schemes.plan_in_words(state.protection.plan),
            "every": plan.every,
            "survives": schemes.losses_survived(self._settings, plan),
            "most_lost": lost,
            "most_lost_seconds": None if step is None else lost * step,
        }

    @staticmethod
    def _told(state: State) -> schemes.ProtectionPlan:
        return state.protection.plan if state.record is None else state.record.protection
