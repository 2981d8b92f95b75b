"""The assessment of a plan: its numbers and verdict, or the reason why the plan cannot hold.

Each refusal names a number of the plan to change, and the new value where it is easy to compute.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from dataclasses import dataclass
from typing import NoReturn

from deadpool_megatron.layout.memory_needs import refusal
from deadpool_megatron.layout.schemes import losses_survived, max_lost_iterations
from deadpool_megatron.planning import shards, traffic
from deadpool_megatron.planning.sections import Plan, PlanError
from deadpool_megatron.planning.traffic import GIGA, NodeLoad, Placement, Timing
from deadpool_megatron.settings import LONGEST_CADENCE, SettingsError

# Measured in this repository on two cores with gloo (README.md): the share by which copies on
# other nodes lengthen a step, and the seconds that a lost node costs (median of the soak).
OVERHEAD_SHARE = 0.09
SWAP_SECONDS = 2.0
# The assessment places every role. A larger number would take minutes, and must be a mistake.
_MAX_ROLES = 1_000_000


@dataclass(frozen=True)
class Assessment:
    """A plan that holds."""

    plan: Plan
    placement: Placement
    loads: dict[int, NodeLoad]
    timing: Timing

    @property
    def lost_steps(self) -> int:
        """The RPO: the largest number of finished steps that a failure makes the job repeat."""
        lag = self.plan.protection.max_lag
        together = shards.slots_of(self.plan) == 2 + lag
        return max_lost_iterations(self.plan.protection.cadence, lag, spans_the_world=together)

    def busiest(self, name: str) -> tuple[float, int]:
        """Return the mean (over nodes with a value) and the maximum of a field of NodeLoad. A field
        per step is an average over the steps of a cadence, as not every step has a generation.
        """
        share = 1 / self.plan.protection.cadence if name.endswith("_per_step") else 1
        values = [value for load in self.loads.values() if (value := getattr(load, name))]
        return share * sum(values) / max(1, len(values)), round(share * max(values, default=0))

    def verdict(self) -> str:
        """Return the verdict in one line."""
        used = self.timing.commit_seconds / self.timing.window_seconds
        memory = self.busiest("memory_bytes")[1] / GIGA
        return (
            f"holds: a commit takes {used:.0%} of its window, slots {memory:.0f} GB of"
            f" {self.plan.cluster.host_memory_gb:g} GB"
        )

    def to_dict(self) -> dict[str, object]:
        """Return the assessment as JSON values."""
        times = dataclasses.asdict(self.timing)
        for name in ("commit_seconds", "stall_seconds"):
            times[name] = getattr(self.timing, name)
        nodes = {}
        for name in (*(f.name for f in dataclasses.fields(NodeLoad)), "memory_bytes"):
            mean, largest = self.busiest(name)
            nodes[name] = {"mean": mean, "largest": largest}
        placement = self.placement
        return {
            "plan": dataclasses.asdict(self.plan),
            "parameters": shards.total_parameters(self.plan.model),
            "roles": len(placement.roles),
            "slots": shards.slots_of(self.plan),
            "largest_shard_bytes": max(role.shard_bytes for role in placement.roles.values()),
            "domains": len(set(placement.topology.domains.values())),
            "nodes": nodes,
            "timing": times,
            "most_lost_steps": self.lost_steps,
            "overhead_share": OVERHEAD_SHARE,
            "verdict": self.verdict(),
        }


def assess(plan: Plan) -> Assessment:
    """Assess a plan. Raises PlanError, with the number to change, if the plan cannot hold."""
    _check_layout(plan)
    _check_scheme(plan)
    placement = traffic.place(plan)
    _check_domains(plan, placement)
    loads = traffic.node_loads(plan, placement)
    times = traffic.timing(plan, placement, loads, shards.step_seconds(plan))
    if times.stall_seconds > 0:
        _refuse_window(plan, times, _possible_cadence(plan, placement, loads))
    _check_memory(plan, loads)
    return Assessment(plan, placement, loads, times)


def _check_layout(plan: Plan) -> None:
    """Check that all sizes divide each other as Megatron requires."""
    model, parallel, cluster = plan.model, plan.parallel, plan.cluster
    experts = bool(model.experts or model.expert_parameters)
    tp, etp, instances = parallel.tp, parallel.etp or parallel.tp, parallel.optimizer_instances
    if parallel.ep > 1 and not experts:
        raise PlanError("parallel.ep: the model has no experts: set it to 1")
    if instances > 1 and not parallel.distributed_optimizer:
        raise PlanError("parallel.optimizer_instances: without distributed_optimizer, set it to 1")
    if model.hidden is not None and model.heads is not None:
        keys = model.kv_heads or model.heads
        _divide("model.heads", model.heads, "model.hidden", model.hidden)
        _divide("parallel.tp", tp, "model.heads", model.heads)
        _divide("model.kv_heads", keys, "model.heads", model.heads)
        if tp % keys:
            _divide("parallel.tp", tp, "model.kv_heads", keys)
        _divide("parallel.pp", parallel.pp, "model.layers", model.layers or 1)
        width = etp if model.experts else tp
        _divide(
            "parallel.etp" if width != tp else "parallel.tp", width, "model.ffn", model.ffn or 1
        )
        if model.experts:
            _divide("parallel.ep", parallel.ep, "model.experts", model.experts)
    for division in parallel.grid.divisions(parallel.dp):
        _divide(f"parallel.{division.key}", *division[1:])
    roles, gpus = parallel.dp * parallel.grid.ranks, cluster.nodes * cluster.gpus_per_node
    if roles > _MAX_ROLES:
        raise PlanError(f"parallel.dp: {roles} roles are more than {_MAX_ROLES}: set it lower")
    if roles != gpus:
        whole, rest = divmod(roles, cluster.gpus_per_node)
        key, fitting = ("parallel.dp", "what fills nodes") if rest else ("cluster.nodes", whole)
        raise PlanError(
            f"{key}: tp x cp x pp x dp = {roles} roles, there are {cluster.nodes} nodes x"
            f" {cluster.gpus_per_node} GPUs = {gpus}: set it to {fitting}"
        )


def _divide(key: str, part: int, name: str, whole: int) -> None:
    """Check that ``part``, the value of ``key``, divides ``whole``, the value of ``name``."""
    if whole % part:
        fitting = next(n for n in range(part - 1, 0, -1) if whole % n == 0)
        raise PlanError(f"{key}: {name} ({whole}) is no multiple of {part}: set it to {fitting}")


def _check_scheme(plan: Plan) -> None:
    """Check the section ``protection`` as a run checks its settings."""
    nodes = plan.cluster.nodes + plan.cluster.spares
    try:
        reason = refusal(shards.protection_plan(plan), nodes, shards.settings_of(plan))
    except SettingsError as error:
        reason = str(error)
    if reason:
        raise PlanError(f"protection: {reason}")


def _check_domains(plan: Plan, placement: Placement) -> None:
    """Check that copies of a role never share a failure domain."""
    if placement.shared_domain_count:
        wanted = losses_survived(shards.settings_of(plan)) + 1
        domains = {*placement.topology.domains.values()}
        raise PlanError(
            f"cluster.racks: {wanted - 1} copies on other nodes need {wanted} failure domains,"
            f" there are {len(domains)}: set it to at least {wanted},"
            " or take it away (each node is one then)"
        )


def _possible_cadence(plan: Plan, placement: Placement, loads: dict[int, NodeLoad]) -> int:
    """Return the smallest cadence whose copies are complete in time; 0 if there is none."""
    step, cadences = (
        shards.step_seconds(plan),
        range(plan.protection.cadence + 1, LONGEST_CADENCE + 1),
    )

    def is_enough(cadence: int) -> bool:
        protection = dataclasses.replace(plan.protection, cadence=cadence)
        rarer = dataclasses.replace(plan, protection=protection)
        return traffic.timing(rarer, placement, loads, step).stall_seconds <= 0

    # The window only grows with the cadence.
    at = bisect.bisect_left(cadences, True, key=is_enough)
    return cadences[at] if at < len(cadences) else 0


def _refuse_window(plan: Plan, times: Timing, cadence: int) -> NoReturn:
    """Raise PlanError: the copies of each step are not complete before the gate has to wait for
    them. ``cadence``: the smallest that is enough; 0 if there is none."""
    rates = {
        "nic_gb_s": times.ship_seconds,
        "checksum_gb_s": times.checksum_seconds,
        "pcie_gb_s": times.copy_seconds,
    }
    key = max(rates, key=lambda name: rates[name])
    late = times.copy_seconds > times.forward_backward_seconds
    raise PlanError(
        f"cluster.{'pcie_gb_s' if late else key}: a commit takes {times.min_commit_seconds:.3g} s"
        f" (copy {times.copy_seconds:.3g}, checksum {times.checksum_seconds:.3g}, ship"
        f" {times.ship_seconds:.3g}), {times.stall_seconds:.3g} s too long: its window at lag"
        f" {plan.protection.max_lag} is {times.window_seconds:.3g} s of a step of"
        f" {times.step_seconds:.3g} s: make this larger"
        + ("" if late else ", or protection.max_lag")
        + (f"; protection.cadence {cadence} is enough" if cadence else "")
    )


def _check_memory(plan: Plan, loads: dict[int, NodeLoad]) -> None:
    """Check that slots and copies fit in the unreserved memory of a node."""
    cluster = plan.cluster
    fullest = max(loads, key=lambda node: loads[node].memory_bytes)
    load, slots = loads[fullest], shards.slots_of(plan)
    needed = load.memory_bytes / GIGA + cluster.host_memory_reserved_gb
    if needed <= cluster.host_memory_gb:
        return
    unit = 10.0 ** (math.floor(math.log10(needed)) - 2)  # three digits, rounded up
    raise PlanError(
        f"cluster.host_memory_gb: node {fullest} needs {load.own_slots_bytes / GIGA:.1f} GB for its"
        f" own {slots} slots per role, {load.copies_bytes / GIGA:.1f} GB for the copies"
        f" that it keeps and {cluster.host_memory_reserved_gb:g} GB reserved, there are"
        f" {cluster.host_memory_gb:g} GB: set it to at least {math.ceil(needed / unit) * unit:g}"
    )
