"""One plan worked out: every number of the answer, and the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.layout.cadence import most_lost
from deadpool_megatron.layout.sizing import GROUP_SIZES, lacking, largest_group
from deadpool_megatron.planning import refusals, risk, spares, traffic
from deadpool_megatron.planning.keys import Plan, PlanError
from deadpool_megatron.planning.layouts import protection_plan, scene_of
from deadpool_megatron.planning.model import step_seconds, total_parameters
from deadpool_megatron.planning.risk import HolderSets
from deadpool_megatron.planning.roles import Placement, place
from deadpool_megatron.planning.traffic import NodeLoad, Timing

_HOUR = 3600.0


@dataclass(frozen=True)
class Risk:
    """The cost of losing nodes; hours are mean times, infinite where it cannot happen."""

    loss_probability: tuple[float, float, float]
    holder_sets: int
    fatal_domains: tuple[str, ...]
    exposure_seconds: float
    hours_between_node_losses: float
    hours_between_state_losses: float


@dataclass(frozen=True)
class Goodput:
    """Shares of time; those with ``_spare`` leave out the waits for a spare."""

    available: float
    hot_swap_with_spare: float
    restart_with_spare: float
    spares_needed: int | None

    @property
    def hot_swap(self) -> float:
        """Share of all time in steps that count."""
        return self.available * self.hot_swap_with_spare

    @property
    def restart(self) -> float:
        """The same without deadpool: the job starts again from its newest checkpoint."""
        return self.available * self.restart_with_spare


@dataclass(frozen=True)
class Assessment:
    """A plan that holds."""

    plan: Plan
    parameters: int
    placement: Placement
    loads: dict[int, NodeLoad]
    timing: Timing
    fetch_seconds: float
    risk: Risk
    goodput: Goodput

    @property
    def reaches_goal(self) -> bool:
        """Return whether the goodput is what is wanted."""
        return self.goodput.hot_swap >= self.plan.goal.goodput


def assess(plan: Plan) -> Assessment:
    """Work a plan out; ``mixed`` as the first scheme that holds, copies before parity and small
    groups before large ones, and one that leaves room for a swap before one that does not, as a
    run chooses. Raises PlanError, with the number to change, when it cannot hold.
    """
    if plan.protection.scheme != "mixed":
        return _assess(plan)
    tight: Assessment | None = None
    last = PlanError("protection.scheme: there is none")
    for changes in _candidates(plan):
        protection = dataclasses.replace(plan.protection, **changes)
        try:
            found = _assess(dataclasses.replace(plan, protection=protection))
        except PlanError as error:
            last = error  # the sparest one says what would be enough
            continue
        if _has_room(found):
            return found
        tight = tight or found
    if tight is None:
        raise last
    return tight


def _has_room(found: Assessment) -> bool:
    """Return whether each node could take over the roles of another one."""
    plan, cluster = found.plan, found.plan.cluster
    left = int((cluster.host_memory_gb - cluster.host_memory_reserved_gb) * traffic.GIGA)
    budgets = dict.fromkeys(found.placement.domains, left)
    scene = dataclasses.replace(scene_of(plan, found.placement), roomy=True)
    return lacking(protection_plan(plan), scene, budgets) is None


def _candidates(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield what a run with ``mixed`` tries, by the same sizes (layout.reckoning.choice)."""
    yield {"scheme": "buddy"}
    most = largest_group(plan.cluster.nodes + plan.cluster.spares, plan.protection.replicas)
    for size in GROUP_SIZES:
        if size <= most:
            yield {"scheme": "parity", "parity_group": size}


def _assess(plan: Plan) -> Assessment:
    refusals.check_layout(plan)
    refusals.check_scheme(plan)
    placement = place(plan)
    refusals.check_domains(plan, placement)
    step = step_seconds(plan)
    loads = traffic.node_loads(plan, placement)
    times = traffic.timing(plan, placement, loads, step)
    refusals.check_window(plan, placement, times)
    refusals.check_memory(plan, placement, loads)
    fetch = traffic.fetch_seconds(plan, placement, loads)
    refusals.check_swap(plan, fetch)
    sets = risk.holder_sets(placement)
    losses = _risk(plan, placement, sets, traffic.reprotect_seconds(plan, loads))
    return Assessment(
        plan=plan,
        parameters=total_parameters(plan.model),
        placement=placement,
        loads=loads,
        timing=times,
        fetch_seconds=fetch,
        risk=losses,
        goodput=_goodput(plan, step, placement.slots, losses.hours_between_state_losses),
    )


def _risk(plan: Plan, placement: Placement, sets: HolderSets, reprotect: float) -> Risk:
    faults, cluster = plan.faults, plan.cluster
    exposure = faults.exposure_seconds
    if exposure is None:
        exposure = faults.swap_seconds + reprotect
    # Without a spare nothing is copied anew until the vaults have written to disk.
    exposure += plan.protection.spare_timeout_seconds * spares.no_spare_probability(
        cluster.nodes, cluster.spares, _away(plan)
    )
    rate = risk.losses_per_hour(sets, faults.node_mtbf_hours, exposure / _HOUR)
    one, two, three = (risk.loss_probability(sets, placement.nodes, lost) for lost in (1, 2, 3))
    return Risk(
        loss_probability=(one, two, three),
        holder_sets=len(sets),
        fatal_domains=risk.fatal_domains(sets, placement.domains),
        exposure_seconds=exposure,
        hours_between_node_losses=faults.node_mtbf_hours / cluster.nodes,
        hours_between_state_losses=1.0 / rate if rate else float("inf"),
    )


def _goodput(plan: Plan, step: float, slots: int, hours_between_state_losses: float) -> Goodput:
    faults, cluster = plan.faults, plan.cluster
    rate = cluster.nodes / (faults.node_mtbf_hours * _HOUR)
    interval = faults.checkpoint_interval_steps * step
    # What one failure costs on average when some of them end at the checkpoint.
    from_checkpoint = 1.0 / (hours_between_state_losses * _HOUR * rate)
    again = lost_steps(plan, slots) * step
    cost = faults.swap_seconds + again + from_checkpoint * (faults.restart_seconds + interval / 2)
    saving = interval / (interval + faults.checkpoint_seconds)
    hot = saving * spares.useful_fraction(rate, step, 0.0, cost)
    restart = spares.useful_fraction(
        rate, interval, faults.checkpoint_seconds, faults.restart_seconds
    )
    away = _away(plan)
    return Goodput(
        available=spares.at_most_away(cluster.nodes + cluster.spares, cluster.spares, away),
        hot_swap_with_spare=hot,
        restart_with_spare=restart,
        spares_needed=spares.spares_needed(cluster.nodes, away, hot, plan.goal.goodput),
    )


def lost_steps(plan: Plan, slots: int) -> int:
    """The RPO: the most finished steps that a loss makes the job compute again."""
    lag = plan.protection.max_lag
    return most_lost(plan.protection.cadence, lag, spans_the_world=slots == 2 + lag)


def _away(plan: Plan) -> float:
    return spares.away_fraction(plan.faults.node_mtbf_hours, plan.faults.repair_hours)


def busiest(found: Assessment, name: str) -> tuple[float, int]:
    """Mean over the nodes that have any, and the largest, of one field of the loads; of those per
    step what it is on average, for not every step sends a whole generation.
    """
    share = traffic.mean_share(found.plan) if name.endswith("_per_step") else 1
    values = [value for load in found.loads.values() if (value := getattr(load, name))]
    return share * sum(values) / max(1, len(values)), round(share * max(values, default=0))


def verdict(found: Assessment) -> str:
    """One line."""
    plan, times, goodput = found.plan, found.timing, found.goodput
    used = times.commit_seconds / times.window_seconds
    memory = busiest(found, "memory_bytes")[1] / traffic.GIGA
    holds = (
        f"holds: a commit takes {used:.0%} of its window, slots {memory:.0f} GB of"
        f" {plan.cluster.host_memory_gb:g} GB"
    )
    goal = f"goodput {goodput.hot_swap:.4f}"
    if found.reaches_goal:
        return f"{holds}; {goal} reaches the goal of {plan.goal.goodput:g}"
    short = f"{holds}; but {goal} is below the goal of {plan.goal.goodput:g}"
    if goodput.spares_needed is not None:
        return f"{short}: set cluster.spares to {goodput.spares_needed}"
    return (
        f"{short}, which no number of spares reaches: lower faults.swap_seconds, or set"
        f" goal.goodput to at most {int(goodput.hot_swap_with_spare * 1e4) / 1e4:g}"
    )


def facts(found: Assessment) -> dict[str, object]:
    """Everything, as plain values for JSON; infinite times are null."""
    timing_facts = dataclasses.asdict(found.timing)
    for name in ("commit_seconds", "stall_seconds", "hidden_fraction"):
        timing_facts[name] = getattr(found.timing, name)
    risk_facts = dataclasses.asdict(found.risk)
    if found.risk.hours_between_state_losses == float("inf"):
        risk_facts["hours_between_state_losses"] = None
    nodes = {}
    for name in (*(f.name for f in dataclasses.fields(NodeLoad)), "memory_bytes"):
        mean, largest = busiest(found, name)
        nodes[name] = {"mean": mean, "largest": largest}
    plan = dataclasses.asdict(found.plan)
    del plan["domains_text"]
    return {
        "plan": plan,
        "parameters": found.parameters,
        "roles": len(found.placement.roles),
        "slots": found.placement.slots,
        "largest_shard_bytes": max(role.shard_bytes for role in found.placement.roles),
        "domains": len(set(found.placement.domains.values())),
        "copies_in_same_domain": found.placement.same_domain,
        "nodes": nodes,
        "timing": timing_facts,
        "fetch_seconds": found.fetch_seconds,
        "most_lost_steps": lost_steps(found.plan, found.placement.slots),
        "risk": risk_facts,
        "goodput": {
            **dataclasses.asdict(found.goodput),
            "hot_swap": found.goodput.hot_swap,
            "restart": found.goodput.restart,
        },
        "reaches_goal": found.reaches_goal,
        "verdict": verdict(found),
    }
