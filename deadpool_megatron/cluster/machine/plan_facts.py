"""What the coordinator knows that a plan of protection is reckoned from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deadpool_megatron.cluster.machine.state import State
from deadpool_megatron.layout.choice import Choice, Measured, choose, sized
from deadpool_megatron.layout.demand import Scene, demand
from deadpool_megatron.layout.records import NodeAddress, Seat
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.settings import Settings


@dataclass(frozen=True)
class Lack:
    """A node whose memory does not do."""

    node: int
    needed_bytes: int
    has_bytes: int

    def in_words(self) -> str:
        """What it would need, and what it has."""
        return (
            f"node {self.node} would need {sized(self.needed_bytes)} of memory for"
            f" generations and has {sized(self.has_bytes)}"
        )


def scene_of(
    state: State,
    settings: Settings,
    seats: Mapping[int, Seat] | None = None,
    nodes: Mapping[int, NodeAddress] | None = None,
) -> Scene | None:
    """Seats, layouts and nodes as they are, or as the next record will say; None before all
    members have registered."""
    chosen = state.seats if seats is None else seats
    if len(state.layouts) < len(chosen):
        return None
    seated = {role: seat.node for role, seat in chosen.items()}
    live = state.nodes if nodes is None else nodes
    domains = {node: known.domain for node, known in live.items()}
    training = set(seated.values())
    spares = [node for node in domains if node not in training]
    return Scene(dict(state.layouts), seated, domains, spares, settings.replicas)


def budgets_of(state: State) -> dict[int, int]:
    """Bytes for generations on each node that has said how many it has."""
    return {n: known.memory_bytes for n, known in state.nodes.items() if known.memory_bytes}


def best_plan(
    scene: Scene, budgets: Mapping[int, int], measured: Measured | None, every: int
) -> Choice:
    """The best plan that leaves every node room to take over roles; where none does, that is left
    out of account: a node that has to may then fail at it, or have copies wait for memory."""
    roomy = replace(scene, roomy=True)
    choice = choose(roomy, budgets, measured, every)
    if lacking(choice.plan, roomy, budgets) is not None:
        return choose(scene, budgets, measured, every)
    return replace(choice, why=f"{choice.why}; with room to take over the roles of another node")


def lacking(plan: ProtectionPlan, scene: Scene, budgets: Mapping[int, int]) -> Lack | None:
    """The node that lacks most memory for ``plan``; None where all have enough."""
    needs = demand(plan, scene).memory
    found = [Lack(n, needs[n], has) for n, has in budgets.items() if needs.get(n, 0) > has]
    return max(found, key=lambda one: (one.needed_bytes - one.has_bytes, -one.node), default=None)


def memory_refusal(plan: ProtectionPlan, state: State, settings: Settings) -> str:
    """Why the nodes have too little memory for ``plan``; empty when they have enough, when that is
    not known yet, or when only the cadence is another one: then slots stay what they are."""
    scene = scene_of(state, settings)
    if scene is None or (state.record and state.record.protection.rules == plan.rules):
        return ""
    lack = lacking(plan, scene, budgets_of(state))
    return "" if lack is None else f"{lack.in_words()}: choose parity with a larger --group"
