"""Plans that cannot hold: each refusal names the number to change, and to what."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NoReturn

from deadpool_megatron.layout.schemes import MOST_BLOCKS
from deadpool_megatron.planning.keys import Plan, PlanError
from deadpool_megatron.planning.model import step_seconds
from deadpool_megatron.planning.roles import Placement
from deadpool_megatron.planning.traffic import GIGA, NodeLoad, Timing, node_loads, timing

# A commit that trails further is not looked for: each unit costs a slot in every segment.
_LARGEST_LAG = 8
# Each is placed: more would take minutes, and are a slip.
_MOST_ROLES = 1_000_000
# To lose a parity group, of all groups together: each is looked at.
_MOST_WAYS = 1_000_000
_KEPT = {
    "buddy": "copies",
    "parity": "parity blocks",
    "local": "copies",
    "local-twice": "second copies",
    "recompute": "copies and steps",
}


def check_layout(plan: Plan) -> None:
    """Everything that has to divide divides. Raises PlanError."""
    model, parallel, cluster = plan.model, plan.parallel, plan.cluster
    experts = bool(model.experts or model.expert_parameters)
    if parallel.ep > 1 and not experts:
        raise PlanError("parallel.ep: the model has no experts: set it to 1")
    etp = parallel.etp or parallel.tp
    if model.hidden is not None and model.heads is not None:
        _divide("model.heads", model.heads, "model.hidden", model.hidden)
        _divide("parallel.tp", parallel.tp, "model.heads", model.heads)
        keys = model.kv_heads or model.heads
        _divide("model.kv_heads", keys, "model.heads", model.heads)
        if parallel.tp % keys:
            _divide("parallel.tp", parallel.tp, "model.kv_heads", keys)
        _divide("parallel.pp", parallel.pp, "model.layers", model.layers or 1)
        width = "parallel.etp" if model.experts and parallel.etp else "parallel.tp"
        _divide(width, etp if model.experts else parallel.tp, "model.ffn", model.ffn or 1)
        if model.experts:
            _divide("parallel.ep", parallel.ep, "model.experts", model.experts)
    stage = parallel.tp * parallel.cp * parallel.dp
    if experts:
        _divide("parallel.ep", etp * parallel.ep, "tp x cp x dp", stage, per=etp)
    instances = parallel.optimizer_instances
    if instances > 1 and not parallel.distributed_optimizer:
        raise PlanError("parallel.optimizer_instances: without distributed_optimizer, set it to 1")
    _divide("parallel.optimizer_instances", instances, "dp x cp", parallel.dp * parallel.cp)
    if experts:
        size = stage // (etp * parallel.ep)
        _divide("parallel.optimizer_instances", instances, "expert data parallelism", size)
    _check_roles(plan, stage * parallel.pp, cluster.nodes * cluster.gpus_per_node)


def _divide(key: str, part: int, of: str, whole: int, per: int = 1) -> None:
    """``part`` is ``per`` times the value of ``key``."""
    if whole % part == 0:
        return
    fitting = [n for n in range(1, part // per + 1) if whole % (n * per) == 0]
    if not fitting:
        raise PlanError(f"{key}: {of} ({whole}) is no multiple of {per}: make {of} one")
    raise PlanError(f"{key}: {of} ({whole}) is no multiple of {part}: set it to {fitting[-1]}")


def _check_roles(plan: Plan, roles: int, gpus: int) -> None:
    if roles > _MOST_ROLES:
        raise PlanError(f"parallel.dp: {roles} roles are more than {_MOST_ROLES}: set it lower")
    if roles == gpus:
        return
    parallel, cluster = plan.parallel, plan.cluster
    there = f"there are {cluster.nodes} nodes x {cluster.gpus_per_node} GPUs = {gpus}"
    if roles % cluster.gpus_per_node == 0:
        raise PlanError(
            f"cluster.nodes: tp x cp x pp x dp = {roles} roles, {there}: set it to"
            f" {roles // cluster.gpus_per_node}"
        )
    pipeline = roles // parallel.dp
    multiple = cluster.gpus_per_node // math.gcd(pipeline, cluster.gpus_per_node)
    raise PlanError(
        f"parallel.dp: tp x cp x pp x dp = {roles} roles do not fill whole nodes, {there}: set it"
        f" to {-(-parallel.dp // multiple) * multiple}"
    )


def check_scheme(plan: Plan) -> None:
    """The keys of the protection go together. Raises PlanError."""
    protection = plan.protection
    if protection.scheme == "recompute" and protection.cadence > 1:
        raise PlanError(
            "protection.cadence: recompute needs the gradients of every step: set it to 1"
        )
    nodes, replicas = plan.cluster.nodes + plan.cluster.spares, protection.survived
    if nodes <= replicas:
        line = f"{_need(replicas)} {replicas + 1} nodes, there are {nodes} with the spares"
        if nodes > 1:
            raise PlanError(f"protection.replicas: {line}: set it to {nodes - 1}")
        raise PlanError(f"cluster.spares: {line}: set it to {replicas}")
    if protection.scheme == "parity":
        _check_group(plan, nodes)


def _check_group(plan: Plan, nodes: int) -> None:
    """As a run does at its start."""
    group, blocks = plan.protection.parity_group, plan.protection.replicas
    if nodes < blocks + 2:
        raise PlanError(
            f"protection.scheme: parity that survives {blocks} lost nodes needs {blocks + 2}"
            f" nodes, there are {nodes} with the spares: set it to buddy"
        )
    needed = max(2, min(group, plan.cluster.nodes)) + blocks
    if needed > nodes:
        raise PlanError(
            f"protection.parity_group: groups of {needed - blocks} and their parity ({blocks}) need"
            f" {needed} nodes, there are {nodes} with the spares: set it to {nodes - blocks}"
        )
    if group + blocks > MOST_BLOCKS:
        raise PlanError(
            f"protection.parity_group: groups of {group} and their parity ({blocks}) are more than"
            f" {MOST_BLOCKS} blocks: set it to {MOST_BLOCKS - blocks}"
        )
    ways, roles = math.comb(needed, blocks + 1), plan.cluster.nodes * plan.cluster.gpus_per_node
    if ways * roles > _MOST_WAYS * (needed - blocks):
        raise PlanError(
            f"protection.replicas: with {blocks} parity blocks a group of {needed - blocks} is lost"
            f" in {ways} ways, too many to count them all: set it lower"
        )


def check_domains(plan: Plan, placement: Placement) -> None:
    """No copy of a role shares a failure domain with another one. Raises PlanError."""
    if not placement.same_domain:
        return
    cluster, replicas = plan.cluster, plan.protection.survived
    domains = len(set(placement.domains.values()))
    line = f"{_need(replicas)} {replicas + 1} failure domains, there are {domains}"
    key = "cluster.domains_file" if cluster.racks is None else "cluster.racks"
    if key == "cluster.racks" and replicas >= cluster.nodes:
        raise PlanError(f"{key}: {line}: take it away (each node, spares too, is one then)")
    if domains > 1:
        line += f": set it to {domains - 1}, or {key} to {replicas + 1} of them"
        raise PlanError(f"protection.replicas: {line}")
    raise PlanError(f"{key}: {line}: set it to at least {replicas + 1} of them")


def _need(replicas: int) -> str:
    return f"{replicas} {'copy' if replicas == 1 else 'copies'} beside the own node need"


def check_window(plan: Plan, placement: Placement, times: Timing) -> None:
    """Every step's copies are done when the gate asks for them. Raises PlanError."""
    if times.stall_seconds <= 0:
        return
    what = (
        f"a commit takes {times.least_commit_seconds:.3g} s (copy {times.copy_seconds:.3g},"
        f" checksum {times.checksum_seconds:.3g}, ship {times.ship_seconds:.3g}), its window at lag"
        f" {plan.protection.max_lag} is {times.window_seconds:.3g} s of a step of"
        f" {times.step_seconds:.3g} s"
    )
    # What costs nothing comes first, then memory, then hardware.
    for lag in range(plan.protection.max_lag + 1, _LARGEST_LAG + 1):
        more = dataclasses.replace(placement, slots=placement.slots + lag - plan.protection.max_lag)
        other = _with(plan, "protection", "max_lag", lag)
        if _fits(other, more) and _spare_gigabytes(other, node_loads(other, more)) >= 0:
            _refuse("protection.max_lag", what, lag)
    for key, seconds in (("nic_gb_s", times.ship_seconds), ("pcie_gb_s", times.copy_seconds)):
        # The window and its two limits leave this much for the one that is changed.
        left = times.window_seconds - (times.least_commit_seconds - seconds)
        limit = times.cycle_seconds if key == "nic_gb_s" else times.forward_backward_seconds
        allowed = min(left, limit)
        if 0 < allowed < seconds:
            rate = _up(getattr(plan.cluster, key) * seconds / allowed)
            if _fits(_with(plan, "cluster", key, rate), placement):
                _refuse(f"cluster.{key}", what, f"at least {rate:g}")
    longer = max(
        times.least_commit_seconds / times.window_seconds,
        times.copy_seconds / times.forward_backward_seconds,
        times.ship_seconds / times.cycle_seconds,
    )
    if plan.cluster.step_seconds is not None:
        least = _up(longer * times.step_seconds)
        _refuse("cluster.step_seconds", what, f"at least {least:g}")
    tokens = (plan.cluster.tokens_per_step or 0) * longer
    _refuse("cluster.tokens_per_step", what, f"at least {_up(tokens):.0f}")


def check_memory(plan: Plan, placement: Placement, loads: dict[int, NodeLoad]) -> None:
    """Slots and copies fit in what is left of a node's memory. Raises PlanError."""
    missing = -_spare_gigabytes(plan, loads)
    if missing <= 0:
        return
    cluster = plan.cluster
    fullest = max(loads, key=lambda node: loads[node].memory_bytes)
    load, kept = loads[fullest], _KEPT[plan.protection.scheme]
    what = (
        f"node {fullest} needs {load.own_slots_bytes / GIGA:.1f} GB for its own {placement.slots}"
        f" slots per role, {load.copies_bytes / GIGA:.1f} GB for {kept} and"
        f" {cluster.host_memory_reserved_gb:g} GB reserved, there are {cluster.host_memory_gb:g} GB"
    )
    least = _up(cluster.host_memory_gb + missing)
    _refuse("cluster.host_memory_gb", what, f"at least {least:g}")


def check_swap(plan: Plan, fetch_seconds: float) -> None:
    """The time of a swap is possible at all. Raises PlanError."""
    if plan.faults.swap_seconds < fetch_seconds:
        raise PlanError(
            f"faults.swap_seconds: {plan.faults.swap_seconds:g} s are too few, a spare needs"
            f" {fetch_seconds:.3g} s alone to fetch its shards: set it to what you measured, above"
            f" {_up(fetch_seconds):g}"
        )


def _refuse(key: str, what: str, value: object) -> NoReturn:
    raise PlanError(f"{key}: {what}: set it to {value}")


def _with(plan: Plan, section: str, key: str, value: Any) -> Plan:
    changed = dataclasses.replace(getattr(plan, section), **{key: value})
    return dataclasses.replace(plan, **{section: changed})


def _fits(plan: Plan, placement: Placement) -> bool:
    loads = node_loads(plan, placement)
    return timing(plan, placement, loads, step_seconds(plan)).stall_seconds <= 0


def _spare_gigabytes(plan: Plan, loads: dict[int, NodeLoad]) -> float:
    cluster = plan.cluster
    fullest = max(load.memory_bytes for load in loads.values())
    return cluster.host_memory_gb - cluster.host_memory_reserved_gb - fullest / GIGA


def _up(value: float) -> float:
    """Three digits, rounded up: a number that a person would type and that is enough."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit
