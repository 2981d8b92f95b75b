"""Parameters of a GPT, and how many of them lie in one pipeline stage of one tensor rank.

Per layer, with h hidden, f ffn, k = kv_heads / heads:

    attention      h·h·(2 + 2k)                   query, key, value, projection
    feed-forward   2·h·f, with swiglu 3·h·f       per expert, if there are experts
    router         h · experts
    norms          2 · h, without rmsnorm 2 · 2h
    biases         h·(1 + 2k) + h, and f (swiglu 2f) + h

and once: vocab·h (twice when untied), positions·h, one last norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.planning.keys import Model, Parallel, Plan

# Megatron pads the vocabulary to a multiple of this times tp (--make-vocab-size-divisible-by).
_VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class Shape:
    """A model's shape with nothing left open; counts are parameters."""

    layers: int
    hidden: int
    vocab: int
    attention: int
    attention_bias: int
    mlp: int
    mlp_bias: int
    norm: int
    router: int
    experts: int
    positions: int
    row_bias: int

    @staticmethod
    def of(model: Model) -> Shape | None:
        """None when only a number of parameters is known."""
        if model.layers is None or model.hidden is None or model.ffn is None:
            return None
        heads, hidden, ffn = model.heads or 1, model.hidden, model.ffn
        keys = hidden * (model.kv_heads or heads) // heads
        width = ffn * 2 if model.swiglu else ffn
        return Shape(
            layers=model.layers,
            hidden=hidden,
            vocab=model.vocab or 0,
            attention=hidden * (2 * hidden + 2 * keys),
            attention_bias=hidden + 2 * keys if model.biases else 0,
            mlp=hidden * (width + ffn),
            mlp_bias=width if model.biases else 0,
            norm=hidden if model.rmsnorm else 2 * hidden,
            router=hidden * model.experts,
            experts=model.experts,
            positions=model.positions,
            row_bias=hidden if model.biases else 0,
        )


def total_parameters(model: Model) -> int:
    """All parameters, each counted once."""
    shape = Shape.of(model)
    if shape is None:
        return model.parameters or 0
    tables = (2 if model.untied else 1) * shape.vocab + shape.positions
    layer = shape.attention + shape.attention_bias + shape.row_bias + 2 * shape.norm + shape.router
    mlp = max(1, shape.experts) * _expert(shape)
    return shape.layers * (layer + mlp) + tables * shape.hidden + shape.norm


def active_parameters(model: Model) -> int:
    """Those that one token goes through: what the 6·N·tokens rule counts."""
    shape = Shape.of(model)
    if shape is None or not shape.experts:
        return total_parameters(model)
    idle = shape.experts - model.experts_per_token
    return total_parameters(model) - shape.layers * idle * _expert(shape)


def _expert(shape: Shape) -> int:
    return shape.mlp + shape.mlp_bias + shape.row_bias


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one GPU in one pipeline stage, shared by its data-parallel peers."""

    dense: float
    expert: float


def stage_parameters(model: Model, parallel: Parallel) -> list[StageParameters]:
    """For each pipeline stage. A tied embedding lies in the first and in the last stage."""
    tp, pp, ep = parallel.tp, parallel.pp, parallel.ep
    etp = parallel.etp or tp
    shape = Shape.of(model)
    if shape is None:
        whole, expert = float(model.parameters or 0), float(model.expert_parameters)
        return [StageParameters((whole - expert) / (tp * pp), expert / (etp * pp * ep))] * pp
    multiple = _VOCAB_MULTIPLE * tp
    table = -(-shape.vocab // multiple) * multiple * shape.hidden / tp
    split = shape.attention + shape.attention_bias
    dense = split / tp + shape.row_bias + 2 * shape.norm + shape.router
    mlp = (shape.mlp + shape.mlp_bias) / (etp if shape.experts else tp) + shape.row_bias
    expert = shape.experts / ep * mlp
    if not shape.experts:
        dense += mlp
    stages = [shape.layers / pp * dense] * pp
    stages[0] += table + shape.positions * shape.hidden
    stages[-1] += shape.norm + (table if pp > 1 or model.untied else 0)
    return [StageParameters(stage, shape.layers / pp * expert) for stage in stages]


def step_seconds(plan: Plan) -> float:
    """As given, or 6 · active parameters · tokens / (GPUs · tflops · 10^12 · efficiency)."""
    cluster = plan.cluster
    if cluster.step_seconds is not None:
        return cluster.step_seconds
    work = 6.0 * active_parameters(plan.model) * (cluster.tokens_per_step or 0)
    gpus = cluster.nodes * cluster.gpus_per_node
    return work / (gpus * (cluster.tflops_per_gpu or 0) * 1e12 * (cluster.efficiency or 0))
