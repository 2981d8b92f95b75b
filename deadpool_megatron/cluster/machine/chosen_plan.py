"""The protection of the state: which plan may be requested, and whether memory is enough for it.

A plan changes only with an epoch. A wanted plan waits in the state and enters the next record,
whatever the reason for that record. If there is no other reason, members pause for the plan at the
next protected iteration (pauses), so that nothing is computed again. Pure functions.
"""

from __future__ import annotations

from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.inputs import ProtectionRequested
from deadpool_megatron.cluster.machine.state import LAST_PHASES, State
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.memory_needs import Topology, refusal, shortfall
from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.layout.schemes import (
    ProtectionPlan,
    format_plan,
    losses_survived,
    max_lost_iterations,
)
from deadpool_megatron.settings import Settings

ASKED_FOR = "asked for by 'deadpool protect'"


def layouts_of(state: State) -> dict[int, RoleLayout]:
    """Return the layouts of the roles with a seat, as far as they are known."""
    layouts = dict(state.memory.layouts)  # copied, as other threads call this too
    return {role: layouts[role] for role in state.seats if role in layouts}


def topology_of(state: State, settings: Settings) -> Topology | None:
    """Return seats, layouts and nodes as they are; None before all members have registered."""
    layouts = layouts_of(state)
    if len(layouts) < len(state.seats):
        return None
    seated = {role: seat.node for role, seat in state.seats.items()}
    domains = {node: entry.domain for node, entry in dict(state.fleet.nodes).items()}
    training = set(seated.values())
    spares = [node for node in domains if node not in training]
    return Topology(layouts, seated, domains, spares, settings.copies)


def budgets_of(state: State) -> dict[int, int]:
    """Return the bytes for generations on each node that has reported them."""
    return {
        n: entry.memory_bytes for n, entry in dict(state.fleet.nodes).items() if entry.memory_bytes
    }


def memory_refusal(plan: ProtectionPlan, state: State, settings: Settings) -> str:
    """Return why the nodes have too little memory for ``plan``; empty when they have enough, when
    that is not known yet, or when only the cadence differs: the slots stay as they are then."""
    topology = topology_of(state, settings)
    if topology is None or (state.record and state.record.protection.scheme == plan.scheme):
        return ""
    node = shortfall(plan, topology, budgets_of(state))
    return "" if node is None else f"{node.describe()}: choose parity with a larger --group"


def take_request(core: Core, event: ProtectionRequested) -> str:
    """Note the wanted plan. Return why it is refused, or an empty text."""
    state, settings = core.state, core.settings
    reason = refusal(event.plan, len(state.fleet.nodes), settings, state.protection.plan)
    reason = reason or memory_refusal(event.plan, state, settings)
    if state.phase in LAST_PHASES:
        reason = "the run is ending"
    if not reason and event.plan != state.protection.plan:
        state.protection.plan, state.protection.reason = event.plan, event.reason
    return reason


def report_plan(core: Core) -> None:
    """Report the protection of the epoch that was just opened, if it is new."""
    state, settings, record = core.state, core.settings, core.state.record
    if record is None or record.protection == state.protection.reported:
        return
    old, plan = state.protection.reported, record.protection
    state.protection.reported = plan
    core.emit(
        Kind.PROTECTION,
        old="" if old is None else format_plan(old),
        new=format_plan(plan),
        why=state.protection.reason or record.cause,
        every=plan.every,
        survives=losses_survived(settings, plan),
        most_lost=max_lost_by(plan, state, settings),
    )


def max_lost_by(plan: ProtectionPlan, state: State, settings: Settings) -> int:
    """Return the RPO: how many finished iterations, at most, a failure makes the job compute
    again."""
    slots = (layout.slots for layout in layouts_of(state).values())
    spans = all(number <= 2 + settings.max_lag for number in slots)
    return max_lost_iterations(plan.every, settings.max_lag, spans_the_world=spans)


def pause_cause(state: State) -> str:
    """Return why members pause for a change of the plan; it becomes the cause of the record."""
    return f"protection becomes {format_plan(state.protection.plan)}: {state.protection.reason}"
