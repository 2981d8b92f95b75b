"""Parameters of a GPT, their shards on the roles of Megatron's split, and the roles' layouts.

Per layer, with h hidden, f ffn, k = kv_heads / heads:

    attention      h·h·(2 + 2k)                   query, key, value, projection
    feed-forward   2·h·f, with swiglu 3·h·f       per expert, if there are experts
    router         h · experts
    norms          2 · h, without rmsnorm 2 · 2h
    biases         h·(1 + 2k) + h, and f (swiglu 2f) + h

and once: vocab·h (twice when untied), positions·h, one last norm. Seats and groups of roles follow
Megatron's numbering (order tp-cp-ep-dp-pp). The layouts are like those that members of the run
would register.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deadpool_megatron.layout.memory_needs import Topology, extras_capacity_bytes
from deadpool_megatron.layout.records import BOUNDARIES, PartInfo, RoleLayout, extras_part
from deadpool_megatron.layout.schemes import ProtectionPlan, first_plan
from deadpool_megatron.planning.sections import Cluster, Model, Parallel, Plan
from deadpool_megatron.settings import Settings

# Megatron pads the vocabulary to a multiple of this times tp (--make-vocab-size-divisible-by).
_VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class Shape:
    """The complete shape of a model. ``attention``, ``mlp`` (of one expert), ``norm``, ``router``
    and ``row_bias`` are numbers of parameters in one layer."""

    layers: int
    hidden: int
    vocab: int
    attention: int
    mlp: int
    norm: int
    router: int
    row_bias: int

    @staticmethod
    def of(model: Model) -> Shape | None:
        """Return the shape; None if only the number of parameters is known."""
        if model.layers is None or model.hidden is None or model.ffn is None:
            return None
        heads, hidden, ffn = model.heads or 1, model.hidden, model.ffn
        keys = hidden * (model.kv_heads or heads) // heads
        width = ffn * 2 if model.swiglu else ffn
        return Shape(
            layers=model.layers,
            hidden=hidden,
            vocab=model.vocab or 0,
            attention=hidden * (2 * hidden + 2 * keys) + (hidden + 2 * keys) * model.biases,
            mlp=hidden * (width + ffn) + width * model.biases,
            norm=hidden if model.rmsnorm else 2 * hidden,
            router=hidden * model.experts,
            row_bias=hidden if model.biases else 0,
        )


def total_parameters(model: Model) -> int:
    """Return the number of all parameters."""
    shape = Shape.of(model)
    if shape is None:
        return model.parameters or 0
    tables = (2 if model.untied else 1) * shape.vocab + model.positions
    layer = shape.attention + shape.row_bias + 2 * shape.norm + shape.router
    mlp = max(1, model.experts) * (shape.mlp + shape.row_bias)
    return shape.layers * (layer + mlp) + tables * shape.hidden + shape.norm


def active_parameters(model: Model) -> int:
    """Return the number of parameters that process one token: N of the rule 6·N·tokens."""
    shape = Shape.of(model)
    if shape is None:
        return total_parameters(model)
    idle = shape.layers * max(0, model.experts - model.experts_per_token)
    return total_parameters(model) - idle * (shape.mlp + shape.row_bias)


@dataclass(frozen=True)
class StageParameters:
    """Numbers of parameters on one GPU of a pipeline stage; data-parallel peers have the same
    parameters."""

    dense: float
    expert: float


def stage_parameters(model: Model, parallel: Parallel) -> list[StageParameters]:
    """Return the parameters of each pipeline stage; a tied embedding is in the first and the last
    stage."""
    tp, pp, ep = parallel.tp, parallel.pp, parallel.ep
    etp = parallel.etp or tp
    shape = Shape.of(model)
    if shape is None:
        whole, expert = float(model.parameters or 0), float(model.expert_parameters)
        return [StageParameters((whole - expert) / (tp * pp), expert / (etp * pp * ep))] * pp
    multiple = _VOCAB_MULTIPLE * tp
    table = -(-shape.vocab // multiple) * multiple * shape.hidden / tp
    dense = shape.attention / tp + shape.row_bias + 2 * shape.norm + shape.router
    mlp = shape.mlp / (etp if model.experts else tp) + shape.row_bias
    expert = model.experts / ep * mlp
    if not model.experts:
        dense += mlp
    stages = [shape.layers / pp * dense] * pp
    stages[0] += table + model.positions * shape.hidden
    stages[-1] += shape.norm + (table if pp > 1 or model.untied else 0)
    return [StageParameters(stage, shape.layers / pp * expert) for stage in stages]


def step_seconds(plan: Plan) -> float:
    """Return the given time of a step, or else 6 · parameters · tokens / (GPUs · tflops · 10^12 ·
    efficiency)."""
    cluster = plan.cluster
    if cluster.step_seconds is not None:
        return cluster.step_seconds
    work = 6.0 * active_parameters(plan.model) * (cluster.tokens_per_step or 0)
    gpus = cluster.nodes * cluster.gpus_per_node
    return work / (gpus * (cluster.tflops_per_gpu or 0) * 1e12 * (cluster.efficiency or 0))


def settings_of(plan: Plan) -> Settings:
    """Return the protection settings of the run. Raises SettingsError."""
    chosen = plan.protection
    return Settings(
        protection=chosen.scheme,
        copies=chosen.copies,
        parity_group=chosen.parity_group,
        cadence=str(chosen.cadence),
    )


def protection_plan(plan: Plan) -> ProtectionPlan:
    """Return the first protection plan of the run."""
    return first_plan(settings_of(plan))


def slots_of(plan: Plan) -> int:
    """Return the number of generations in a segment: the lag plus 2, or plus 3 where no collective
    keeps all roles together at their gates."""
    parallel = plan.parallel
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    spans_world = parallel.distributed_optimizer and parallel.optimizer_instances == 1
    return (2 if spans_world or world == 1 else 3) + plan.protection.max_lag


def topology_of(plan: Plan) -> Topology:
    """Return the seats and layouts of all roles."""
    parallel, cluster = plan.parallel, plan.cluster
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    stages = stage_parameters(plan.model, parallel)
    return Topology(
        layouts={
            role: _layout(role, plan, stages[role // (world // parallel.pp)])
            for role in range(world)
        },
        seats={role: role // cluster.gpus_per_node for role in range(world)},
        domains={node: _rack(node, cluster) for node in range(cluster.nodes + cluster.spares)},
        spares=range(cluster.nodes, cluster.nodes + cluster.spares),
        survived=plan.protection.copies,
    )


def _rack(node: int, cluster: Cluster) -> str:
    """Return the rack of a node. Training nodes fill racks of equal size, and spares are put in
    the racks in turn. Without racks, each node is a failure domain of its own."""
    if cluster.racks is None:
        return f"node{node}"
    if node >= cluster.nodes:
        return f"rack{(node - cluster.nodes) % cluster.racks}"
    return f"rack{node * cluster.racks // cluster.nodes}"


def _layout(role: int, plan: Plan, stage: StageParameters) -> RoleLayout:
    chosen = plan.protection
    nbytes = extras_capacity_bytes(chosen.extras_bytes_per_role, int(chosen.extras_room_mb * 1e6))
    extras = [PartInfo(extras_part(boundary), nbytes, (role,)) for boundary in BOUNDARIES]
    peers = plan.parallel.grid.data_peers(role, plan.parallel.dp)
    return RoleLayout(role, (*_shards(role, plan, stage), *extras), peers, slots_of(plan), "")


def _shards(role: int, plan: Plan, stage: StageParameters) -> Iterator[PartInfo]:
    """Yield the shard parts of the dense optimizer and of the experts' optimizer."""
    grid, replicas = plan.parallel.grid, plan.parallel.dp
    groups = [(stage.dense, grid.data_peers(role, replicas))]
    if stage.expert:
        groups.append((stage.expert, grid.expert_data_peers(role, replicas)))
    for number, (parameters, group) in enumerate(groups):
        name, nbytes = f"shard{number}", parameters * plan.model.state_bytes_per_parameter
        if not plan.parallel.distributed_optimizer:
            yield PartInfo(name, math.ceil(nbytes), group)
            continue
        # An optimizer instance is a range of the group. Ranks at the same place of their instances
        # hold equal bytes.
        shards = len(group) // plan.parallel.optimizer_instances
        place = group.index(role) % shards
        yield PartInfo(name, math.ceil(nbytes / shards), group[place::shards])
