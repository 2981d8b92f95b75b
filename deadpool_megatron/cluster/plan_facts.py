"""What the coordinator knows that a plan of protection is reckoned from. Pure."""

from __future__ import annotations

from deadpool_megatron.cluster.machine_state import State
from deadpool_megatron.layout.demand import Scene, demand
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.settings import Settings

_GIGA = 1e9


def scene_of(state: State, settings: Settings) -> Scene | None:
    """Seats, layouts and nodes as they are; None before all members have registered."""
    if len(state.layouts) < len(state.seats):
        return None
    seats = {role: seat.node for role, seat in state.seats.items()}
    domains = {node: known.domain for node, known in state.nodes.items()}
    training = set(seats.values())
    spares = [node for node in domains if node not in training]
    return Scene(dict(state.layouts), seats, domains, spares, settings.replicas)


def budgets_of(state: State) -> dict[int, int]:
    """Bytes for generations on each node that has said how many it has."""
    return {n: known.memory_bytes for n, known in state.nodes.items() if known.memory_bytes}


def memory_refusal(plan: ProtectionPlan, state: State, settings: Settings) -> str:
    """Why the nodes have too little memory for ``plan``; empty when they have enough, when that is
    not known yet, or when only the cadence is another one: then slots stay what they are."""
    scene = scene_of(state, settings)
    if scene is None or (state.record and state.record.protection.rules == plan.rules):
        return ""
    needs = demand(plan, scene).memory
    lacking = {n: needs[n] - has for n, has in budgets_of(state).items() if needs[n] > has}
    if not lacking:
        return ""
    node = max(sorted(lacking), key=lambda one: lacking[one])
    return (
        f"node {node} would need {needs[node] / _GIGA:.3g} GB of memory for generations and has"
        f" {(needs[node] - lacking[node]) / _GIGA:.3g} GB: choose parity with a larger --group"
    )
