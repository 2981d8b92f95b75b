"""Roles that can use each other's model objects: stage classes, and what still names the role.

Two roles are of one class when their models have layers of equal kinds and equal slices of them.
Then a spare that was built for one becomes the other in place: its groups are renumbered, the
numbers of its layers shifted. Only the optimizer is made again, for its shard lies elsewhere.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

# Settings that make a layer depend on its number in the whole model (transformer_config.py):
# with one of them, stages with other numbers are of other classes.
_BY_NUMBER = (
    "apply_query_key_layer_scaling",
    "no_rope_freq",
    "window_attn_skip_freq",
    "linear_attention_freq",
    "first_last_layers_bf16",
    "heterogeneous_block_specs",
    "pipeline_model_parallel_layout",
    "mtp_num_layers",
)


@dataclass(frozen=True)
class Coordinates:
    """A role's ranks along the dimensions that decide over its model."""

    tensor: int
    context: int
    pipeline: int
    expert: int
    expert_tensor: int


def coordinates(args: Any, role: int) -> Coordinates:
    """Of ``role``, from Megatron's validated arguments.

    As parallel_state.py, RankGenerator: a mixed-radix number, the first dimension of the order
    counting fastest; experts have an order of their own.
    """
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    tp, cp, pp = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.pipeline_model_parallel_size,
    )
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tp
    world = args.world_size
    dense = _digits(
        role, order, {"tp": tp, "cp": cp, "ep": 1, "dp": world // (tp * cp * pp), "pp": pp}
    )
    experts = _digits(
        role, order, {"tp": etp, "cp": 1, "ep": ep, "dp": world // (etp * ep * pp), "pp": pp}
    )
    return Coordinates(
        dense["tp"], dense["cp"], dense["pp"], expert=experts["ep"], expert_tensor=experts["tp"]
    )


def stage_class(args: Any, config: Any, role: int) -> str:
    """Equal for roles that can use each other's model objects, given the model's ``config``."""
    place = coordinates(args, role)
    stages = args.pipeline_model_parallel_size
    kind = {0: "first", stages - 1: "last"}.get(place.pipeline, "middle")
    if stages == 1:
        kind = "only"
    pattern = layer_pattern(args)
    if pattern:
        layers = _segments(args, config, pattern)[place.pipeline :: stages]
    elif layout := _layout(config):
        layers = ["".join(str(kind.value) for kind in chunk) for chunk in layout[place.pipeline]]
    else:
        layers = [str(number) for number in _numbers(args, config, place.pipeline)]
    text = f"{kind}.layers{'+'.join(layers)}"
    text += f".tp{place.tensor}.cp{place.context}.ep{place.expert}.etp{place.expert_tensor}"
    if args.context_parallel_size > 1:
        # TransformerEngine's attention keeps the global ranks of its context-parallel peers.
        return f"{text}.role{role}"
    is_by_number = getattr(config, "moe_layer_freq", 1) != 1
    is_by_number = is_by_number or any(getattr(config, name, None) for name in _BY_NUMBER)
    if is_by_number or (getattr(args, "spec", None) and not pattern):
        text += f".from{'+'.join(map(str, layer_offsets(args, config, role)))}"
    return text


def layer_offsets(args: Any, config: Any, role: int) -> list[int]:
    """Number of layers before each model chunk of ``role``."""
    stage, stages = coordinates(args, role).pipeline, args.pipeline_model_parallel_size
    if pattern := layer_pattern(args):
        segments = _segments(args, config, pattern)
        return [len("".join(segments[:at])) for at in range(stage, len(segments), stages)]
    if layout := _layout(config):
        chunks = [
            chunk.count(LayerType.decoder) for row in zip(*layout, strict=True) for chunk in row
        ]
        return [sum(chunks[:at]) for at in range(stage, len(chunks), stages)]
    return [get_transformer_layer_offset(config, chunk, stage) for chunk in _chunks(args)]


def layer_pattern(args: Any) -> str:
    """The kinds of all layers of a hybrid model, a character each, with Megatron's marks between
    segments; empty for other models."""
    pattern: str | None = getattr(args, "hybrid_layer_pattern", None)  # since 0.17
    names = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_attention_ratio")
    if pattern or not any(getattr(args, name, None) for name in names):
        return pattern or ""
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    ratios = (args.hybrid_attention_ratio, args.hybrid_mlp_ratio)
    return "".join(allocate_layers(args.num_layers, *ratios, args.hybrid_override_pattern))


def commonest_role(args: Any, config: Any, wanted: int, members_per_node: int) -> int:
    """A role of the commonest class among those that lie on nodes where ``wanted`` does.

    ``wanted`` itself when its class is as common as any.
    """
    slot = wanted % members_per_node
    roles = range(slot, args.world_size, members_per_node)
    classes = {role: stage_class(args, config, role) for role in roles}
    counts = Counter(classes.values())
    most = max(counts.values())
    if counts[classes[wanted]] == most:
        return wanted
    return next(role for role in roles if counts[classes[role]] == most)


def shift_layers(model_chunks: list[Any], by: list[int]) -> None:
    """Add to the number of every layer of each chunk, and of what a layer consists of."""
    for chunk, delta in zip(model_chunks, by, strict=True):
        for module in chunk.modules() if delta else ():
            if isinstance(getattr(module, "layer_number", None), int):
                module.layer_number += delta


def renumber_buckets(model_chunks: list[Any]) -> None:
    """The one rank that DDP keeps as a number: which shard of a bucket is the own one
    (param_and_grad_buffer.py, _ParamAndGradBucketGroup)."""
    for chunk in model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            shards = getattr(group, "intra_distributed_optimizer_instance_group", None)
            if shards is not None:
                group.intra_distributed_optimizer_instance_rank = shards.rank()


def _digits(role: int, order: str, sizes: dict[str, int]) -> dict[str, int]:
    found = {}
    for name in order.split("-"):
        found[name] = role % sizes[name]
        role //= sizes[name]
    return found


def _chunks(args: Any) -> list[int | None]:
    virtual = args.virtual_pipeline_model_parallel_size
    return [None] if virtual is None else list(range(virtual))


def _layout(config: Any) -> list[list[list[Any]]] | None:
    """The layers of each model chunk of each stage, of --pipeline-model-parallel-layout. Megatron's
    functions answer for the own stage only, whichever is asked for, and for none without groups."""
    given = getattr(config, "pipeline_model_parallel_layout", None)
    return given.layout if given else None


def _numbers(args: Any, config: Any, stage: int) -> list[int]:
    """Of the layers of each model chunk of a stage."""
    return [get_num_layers_to_build(config, chunk, stage) for chunk in _chunks(args)]


def _segments(args: Any, config: Any, pattern: str) -> list[str]:
    """The kinds of layers of all model chunks in the order of the model (Megatron's
    hybrid_layer_allocation.py, select_pipeline_segment)."""
    segments = pattern.split("/")[0].split("|")
    if len(segments) > 1 or not pattern:
        return segments
    kinds = iter(segments[0])
    counts = [_numbers(args, config, stage) for stage in range(args.pipeline_model_parallel_size)]
    return ["".join(itertools.islice(kinds, count)) for (count,) in counts]
