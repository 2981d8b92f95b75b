"""Hazards of a run, drawn in advance."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.state import LAST_PHASES, Phase
from deadpool_megatron.layout.schemes import plan_of_kind
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.preflight.health import Health
from tests.simulated.late import feed_stale
from tests.simulated.world import World

FIT = HostFacts("host")
SICK = replace(FIT, health=Health.OUT, health_text="row remapping failed")
MAX_NODES = 16
PHASES = (Phase.CLOSING, Phase.DECIDING, Phase.OPENING, Phase.PAUSING, Phase.WAITING_SPARE)


#: time in seconds, kind, and two numbers that choose among what there is
Hazard = tuple[float, str, int, int]


def node_of(world: World, a: int) -> int:
    return sorted(world.nodes)[a % len(world.nodes)]


def role_of(world: World, a: int) -> int:
    return sorted(world.roles)[a % len(world.roles)]


def lose_node(world: World, a: int, b: int) -> None:
    """Mostly as many as the copies allow, sometimes more."""
    if world.losses_since_protected < world.tolerance or b % 8 == 0:
        world.lose(node_of(world, a))


def end_member(world: World, a: int, b: int) -> None:
    node = node_of(world, a)
    if members := sorted(world.nodes[node].members):
        world.end_member(node, members[b % len(members)])


def suspect_member(world: World, a: int, _: int) -> None:
    members = world.state.fleet.members
    for place in sorted(members)[a % (len(members) + 1) :][:1]:
        world.feed(ev.MemberSuspected(*place, members[place].incarnation, "frozen"))


def join_spare(world: World, _: int, __: int) -> None:
    if world.next_node < MAX_NODES:
        world.join()


def drain(world: World, a: int, _: int) -> None:
    world.feed(ev.DrainRequested(node_of(world, a)))


def reach(world: World, phase: Phase, a: int) -> None:
    """A first failure, or a drain, leads to the phase."""
    first = {Phase.PAUSING: drain, Phase.WAITING_SPARE: lose_node}.get(phase, end_member)
    first(world, a, a)
    world.settle(until=phase)


def strike_again(world: World, a: int, b: int) -> None:
    """A second failure hits in a phase of the first recovery."""
    reach(world, PHASES[b % 4], a)
    if world.nodes:
        (lose_node if b % 2 else end_member)(world, a // 7, b // 7)


def strike_coordinator(world: World, a: int, b: int) -> None:
    """The coordinator dies in a phase of a recovery."""
    reach(world, PHASES[b % 5], a)
    world.restart_coordinator(landed=bool(a % 2), received=(0, 1, 10)[a // 2 % 3])


def strike_coordinating_node(world: World, a: int, b: int) -> None:
    """A node is lost with the coordinator on it. Its host refuses connections, or is silent."""
    if world.state.phase in LAST_PHASES or world.losses_since_protected >= world.tolerance:
        return
    node = node_of(world, a)
    world.lose(node, report=False)
    world.restart_coordinator(landed=bool(b % 2))
    if b % 3:
        world.clock.after_delay(lambda: world.feed(ev.AgentEnded(node)), "refusal", node)


def see_nan(world: World, a: int, b: int) -> None:
    """Often another failure closes the epoch before it is reported."""
    world.see_nan(role_of(world, a))
    if b % 2:
        end_member(world, b // 2, b // 2)


def report_facts(world: World, a: int, b: int) -> None:
    world.feed(ev.FactsReported(node_of(world, a), SICK if b % 2 else FIT))


def save(world: World, _: int, __: int) -> None:
    path = f"/saves/{world.epoch}-{world.state.reached}"
    if world.state.phase is Phase.RUNNING:
        world.feed(ev.DurableValid(world.state.reached, path))


def refuse_size(world: World, _: int, b: int) -> None:
    """The next change of size fails, perhaps a second time."""
    world.refusals = 1 + b % 12


def change_plan(world: World, a: int, b: int) -> None:
    plan = plan_of_kind(("buddy", "parity")[a % 2], 1 + b % 3, 2)
    world.feed(ev.ProtectionRequested(plan, "a test"))


#: each kind with its share
KINDS: Mapping[str, tuple[float, Callable[[World, int, int], object]]] = {
    "lose-node": (3, lose_node),
    "end-member": (3, end_member),
    "strike-again": (3, strike_again),
    "strike-coordinator": (3, strike_coordinator),
    "strike-coordinating-node": (2, strike_coordinating_node),
    "suspect-member": (1, suspect_member),
    "join-spare": (2, join_spare),
    "drain": (1, drain),
    "change-plan": (1, change_plan),
    "end-export": (1, lambda world, a, _: world.end_export(("", "/exports/iter_0000001")[a % 2])),
    "dump": (0.2, lambda world, _, __: world.feed(ev.DumpRequested("time is over"))),
    "take-over": (1, lambda world, _, __: world.take_over_quietly()),
    "see-nan": (0.5, see_nan),
    "report-facts": (1, report_facts),
    "forget-fault": (0.5, lambda world, a, _: world.forget_fault(role_of(world, a))),
    "save": (2, save),
    "refuse-size": (1, refuse_size),
    "stale": (2, lambda world, _, __: feed_stale(world)),
}


def draw(seed: str, count: int, mean_seconds: float) -> list[Hazard]:
    """Return hazards of all kinds, in order, at exponential intervals."""
    choose, at, hazards = random.Random(seed), 0.0, list[Hazard]()
    for kind in choose.choices([*KINDS], [share for share, _ in KINDS.values()], k=count):
        at += choose.expovariate(1 / mean_seconds)
        hazards.append((round(at, 2), kind, choose.randrange(1000), choose.randrange(1000)))
    return hazards
