"""The protection of the state: which plan may be asked for, whether memory is enough, what is told.

A plan changes only with an epoch. A wanted one waits in the state, goes into the next record for
whatever reason that is made, and if nothing else happens members pause for it at the next boundary
that is protected (pauses), so that nothing is computed again.

With ``mixed`` there is one choice at the start, none afterwards. How the members lay out their
state is known when all have built it, in the first epoch, or from the slots of a run that continues
from memory. The rule (reckoning.choice) is applied then, before anything is computed. Later nodes
may be lost: a plan that the others lack memory for is not changed for another one; the run waits
for a node to join, and is saved if none does. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.inputs import ProtectionRequested
from deadpool_megatron.cluster.machine.state import LAST_PHASES, Phase, State
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import NodeAddress, Restore, RoleLayout, Seat
from deadpool_megatron.layout.schemes import (
    ProtectionPlan,
    losses_survived,
    most_lost,
    plan_in_words,
)
from deadpool_megatron.layout.sizing import Scene, choose, lacking, refusal
from deadpool_megatron.settings import Settings

ASKED_FOR = "asked for by 'deadpool protect'"
_MIXED = "mixed"
_NONE: Mapping[int, RoleLayout] = {}


def scene_of(
    state: State,
    settings: Settings,
    seats: Mapping[int, Seat] | None = None,
    nodes: Mapping[int, NodeAddress] | None = None,
    inherited: Mapping[int, RoleLayout] = _NONE,
) -> Scene | None:
    """Return seats, layouts and nodes as they are, or as the next record will say; None before all
    members have registered. ``inherited``: layouts that only memory tells."""
    chosen = state.seats if seats is None else seats
    layouts = {**state.memory.layouts, **inherited}
    if len(layouts) < len(chosen):
        return None
    seated = {role: seat.node for role, seat in chosen.items()}
    live = dict(state.fleet.nodes) if nodes is None else nodes  # others ask in a thread
    domains = {node: known.domain for node, known in live.items()}
    training = set(seated.values())
    spares = [node for node in domains if node not in training]
    return Scene(layouts, seated, domains, spares, settings.replicas)


def budgets_of(state: State) -> dict[int, int]:
    """Return the bytes for generations on each node that has said how many it has."""
    return {
        n: known.memory_bytes for n, known in dict(state.fleet.nodes).items() if known.memory_bytes
    }


def memory_refusal(plan: ProtectionPlan, state: State, settings: Settings) -> str:
    """Return why the nodes have too little memory for ``plan``; empty when they have enough, when
    that is not known yet, or when only the cadence is another one: slots stay what they are then.
    """
    scene = scene_of(state, settings)
    if scene is None or (state.record and state.record.protection.scheme == plan.scheme):
        return ""
    lack = lacking(plan, scene, budgets_of(state))
    return "" if lack is None else f"{lack.in_words()}: choose parity with a larger --group"


def take_request(core: Core, event: ProtectionRequested) -> str:
    """Note the wanted plan; returns why it cannot be."""
    state = core.state
    settings = core.config.settings
    why = refusal(event.plan, len(state.fleet.nodes), settings, state.protection.plan)
    why = why or memory_refusal(event.plan, state, settings)
    if state.phase in LAST_PHASES:
        why = "the run is ending"
    if not why and event.plan != state.protection.plan:
        state.protection.plan, state.protection.why = event.plan, event.why
    return why


def tell_plan(core: Core) -> None:
    """Say what protects the epoch that was just opened, if that is new."""
    state, record = core.state, core.state.record
    if record is None or record.protection == state.protection.told:
        return
    old, plan = state.protection.told, record.protection
    settings = core.config.settings
    state.protection.told = plan
    core.emit(
        Kind.PROTECTION,
        old="" if old is None else plan_in_words(old),
        new=plan_in_words(plan),
        why=state.protection.why or record.cause,
        every=plan.every,
        survives=losses_survived(settings, plan),
        most_lost=most_lost_by(plan, state.memory.layouts.values(), settings),
    )


def most_lost_by(plan: ProtectionPlan, layouts: Iterable[RoleLayout], settings: Settings) -> int:
    """The RPO: the most finished iterations that a failure makes the job compute again."""
    spans = all(layout.slots <= 2 + settings.max_lag for layout in layouts)
    return most_lost(plan.every, settings.max_lag, spans_the_world=spans)


def pause_cause(state: State) -> str:
    """Return why members pause for a change of the plan; it becomes the cause of the record."""
    return f"protection becomes {plan_in_words(state.protection.plan)}: {state.protection.why}"


def unfit(core: Core) -> str:
    """Return why the first epoch must be left for another plan, which is in the state then; empty
    when it need not. To be asked once, when the last member has said how it lays out its state."""
    state, record = core.state, core.state.record
    if state.phase is not Phase.OPENING or record is None or record.restore.kind == "memory":
        return ""
    if core.config.settings.protection != _MIXED or state.protection.plan != record.protection:
        return ""
    if why := _choose(core, scene_of(state, core.config.settings)):
        return why
    changed = core.state.protection.plan != record.protection
    return f"{plan_in_words(record.protection)} needs more memory than there is" if changed else ""


def settle(
    core: Core, seats: Mapping[int, Seat], nodes: Mapping[int, NodeAddress], restore: Restore
) -> str:
    """Return why these nodes cannot keep what is to be restored; empty when they can.

    Where training begins, the state has a plan then that fits.
    """
    settings = core.config.settings
    if settings.protection != _MIXED:
        return ""
    # A coordinator that took over may have the layouts from the slots only.
    state, inherited = core.state, core.state.memory.in_slots(core.config.world_size)
    scene = scene_of(state, settings, seats, nodes, inherited)
    if state.restarted or restore.kind != "memory":
        return _choose(core, scene)
    if scene is None:
        return ""
    lack = lacking(state.protection.plan, scene, budgets_of(state))
    return "" if lack is None else f"{plan_in_words(state.protection.plan)}: {lack.in_words()}"


def _choose(core: Core, scene: Scene | None) -> str:
    if scene is None:
        return ""
    state, budgets = core.state, budgets_of(core.state)
    if lacking(state.protection.plan, replace(scene, roomy=True), budgets) is None:
        return ""
    choice = choose(scene, budgets, state.protection.plan.every)
    why = choice.lack.in_words() if choice.lack is not None else ""
    why = why or refusal(choice.plan, len(scene.domains), core.config.settings)
    if why:
        words = plan_in_words(choice.plan)
        return (
            f"--deadpool-protection mixed: {choice.why}, {words} needs least: {why}: raise"
            " --deadpool-memory-gb or add nodes"
        )
    if choice.plan != state.protection.plan:
        state.protection.plan = choice.plan
        state.protection.why = f"for lack of memory: {choice.why}"
    return ""
