"""The protection of the state: which plan may be asked for, whether memory is enough, what is told.

A plan changes only with an epoch. A wanted one waits in the state, goes into the next record for
whatever reason that is made, and if nothing else happens members pause for it at the next boundary
that is protected (epoch/pausing), so that nothing is computed again.

With ``mixed`` there is one choice at the start, none afterwards. How the members lay out their
state is known when all have built it, in the first epoch, or from the slots of a run that continues
from memory. The rule (reckoning.choice) is applied then, before anything is computed. Later nodes
may be lost: a plan that the others lack memory for is not changed for another one; the run waits
for a node to join, and is saved if none does. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deadpool_megatron.cluster.machine.inputs import ProtectionRequested
from deadpool_megatron.cluster.machine.state.phases import LAST_PHASES, Phase
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.cadence import most_lost
from deadpool_megatron.layout.records import NodeAddress, Restore, RoleLayout, Seat
from deadpool_megatron.layout.schemes import (
    ProtectionPlan,
    losses_survived,
    plan_in_words,
)
from deadpool_megatron.layout.sizing import Scene, choose, lacking, refusal
from deadpool_megatron.settings import Settings

ASKED_FOR = "asked for by 'deadpool protect'"
_MIXED = "mixed"


def scene_of(
    state: State,
    settings: Settings,
    seats: Mapping[int, Seat] | None = None,
    nodes: Mapping[int, NodeAddress] | None = None,
) -> Scene | None:
    """Return seats, layouts and nodes as they are, or as the next record will say; None before all
    members have registered."""
    chosen = state.seats if seats is None else seats
    if len(state.memory.layouts) < len(chosen):
        return None
    seated = {role: seat.node for role, seat in chosen.items()}
    live = state.fleet.nodes if nodes is None else nodes
    domains = {node: known.domain for node, known in live.items()}
    training = set(seated.values())
    spares = [node for node in domains if node not in training]
    return Scene(dict(state.memory.layouts), seated, domains, spares, settings.replicas)


def budgets_of(state: State) -> dict[int, int]:
    """Return the bytes for generations on each node that has said how many it has."""
    return {n: known.memory_bytes for n, known in state.fleet.nodes.items() if known.memory_bytes}


def memory_refusal(plan: ProtectionPlan, state: State, settings: Settings) -> str:
    """Return why the nodes have too little memory for ``plan``; empty when they have enough, when
    that is not known yet, or when only the cadence is another one: slots stay what they are then.
    """
    scene = scene_of(state, settings)
    if scene is None or (state.record and state.record.protection.scheme == plan.scheme):
        return ""
    lack = lacking(plan, scene, budgets_of(state))
    return "" if lack is None else f"{lack.in_words()}: choose parity with a larger --group"


def take_request(turn: Turn, event: ProtectionRequested) -> str:
    """Note the wanted plan; returns why it cannot be."""
    state = turn.state
    settings = turn.config.settings
    why = refusal(event.plan, len(state.fleet.nodes), settings, state.protection.plan)
    why = why or memory_refusal(event.plan, state, settings)
    if state.phase in LAST_PHASES:
        why = "the run is ending"
    if not why and event.plan != state.protection.plan:
        turn.state = state._replace(protection=state.protection.changed(event.plan, event.why))
    return why


def tell_plan(turn: Turn) -> None:
    """Say what protects the epoch that was just opened, if that is new."""
    state, record = turn.state, turn.state.record
    if record is None or record.protection == state.protection.told:
        return
    old, plan = state.protection.told, record.protection
    settings = turn.config.settings
    turn.state = state._replace(protection=replace(state.protection, told=plan))
    turn.emit(
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


def unfit(turn: Turn) -> str:
    """Return why the first epoch must be left for another plan, which is in the state then; empty
    when it need not. To be asked once, when the last member has said how it lays out its state."""
    state, record = turn.state, turn.state.record
    if state.phase is not Phase.OPENING or record is None or record.restore.kind == "memory":
        return ""
    if turn.config.settings.protection != _MIXED or state.protection.plan != record.protection:
        return ""
    if why := _choose(turn, scene_of(state, turn.config.settings)):
        return why
    changed = turn.state.protection.plan != record.protection
    return f"{plan_in_words(record.protection)} needs more memory than there is" if changed else ""


def settle(
    turn: Turn, seats: Mapping[int, Seat], nodes: Mapping[int, NodeAddress], restore: Restore
) -> str:
    """Return why these nodes cannot keep what is to be restored; empty when they can.

    Where training begins, the state has a plan then that fits.
    """
    settings = turn.config.settings
    if settings.protection != _MIXED:
        return ""
    # A coordinator that took over may have the layouts from the slots only.
    state = turn.state
    state = state._replace(memory=state.memory.with_inherited(turn.config.world_size))
    scene = scene_of(state, settings, seats, nodes)
    if state.restarted or restore.kind != "memory":
        return _choose(turn, scene)
    if scene is None:
        return ""
    lack = lacking(state.protection.plan, scene, budgets_of(state))
    return "" if lack is None else f"{plan_in_words(state.protection.plan)}: {lack.in_words()}"


def _choose(turn: Turn, scene: Scene | None) -> str:
    if scene is None:
        return ""
    state, budgets = turn.state, budgets_of(turn.state)
    if lacking(state.protection.plan, replace(scene, roomy=True), budgets) is None:
        return ""
    choice = choose(scene, budgets, state.protection.plan.every)
    why = choice.lack.in_words() if choice.lack is not None else ""
    why = why or refusal(choice.plan, len(scene.domains), turn.config.settings)
    if why:
        words = plan_in_words(choice.plan)
        return (
            f"--deadpool-protection mixed: {choice.why}, {words} needs least: {why}: raise"
            " --deadpool-memory-gb or add nodes"
        )
    if choice.plan != state.protection.plan:
        chosen = state.protection.changed(choice.plan, f"for want of memory: {choice.why}")
        turn.state = state._replace(protection=chosen)
    return ""
