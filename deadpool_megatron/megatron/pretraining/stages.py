"""Stage classes: roles that can use each other's model objects, and the change of such a role.

Two roles are of the same class when their models have layers of equal kinds and equal slices of
them. Then a spare that was built for the first role takes the second role in place: its groups are
renumbered, and the numbers of its layers are shifted. Only the optimizer is made again, since its
shard lies elsewhere.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from deadpool_megatron.layout.grid import Coordinates
from deadpool_megatron.planning.model_replicas import Workload

# Settings that make a layer depend on its number in the whole model (transformer_config.py). With
# any of them, stages whose layers have other numbers are of other classes.
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


def coordinates(args: Any, role: int) -> Coordinates:
    """Return the coordinates of ``role``, from Megatron's validated arguments."""
    grid = Workload.of(args).grid
    return grid.coordinates(role, args.world_size // grid.ranks)


def stage_class(args: Any, config: Any, role: int) -> str:
    """Return a name that is equal for roles that can use each other's model objects.

    ``config``: the configuration of the model.
    """
    place = coordinates(args, role)
    stages = args.pipeline_model_parallel_size
    kind = {0: "first", stages - 1: "last"}.get(place.pipeline, "middle")
    kind = "only" if stages == 1 else kind
    if pattern := layer_pattern(args):
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
    """Return the number of layers before each model chunk of ``role``."""
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
    """Return the kinds of all layers of a hybrid model, a character each, with Megatron's marks
    between segments; empty for other models."""
    pattern: str | None = getattr(args, "hybrid_layer_pattern", None)  # since 0.17
    names = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_attention_ratio")
    if pattern or not any(getattr(args, name, None) for name in names):
        return pattern or ""
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    ratios = (args.hybrid_attention_ratio, args.hybrid_mlp_ratio)
    return "".join(allocate_layers(args.num_layers, *ratios, args.hybrid_override_pattern))


def commonest_role(args: Any, config: Any, wanted: int, members_per_node: int) -> int:
    """Return a role of the commonest class among those with the local rank of ``wanted``.

    It is ``wanted`` if no class is more common.
    """
    roles = range(wanted % members_per_node, args.world_size, members_per_node)
    classes = {role: stage_class(args, config, role) for role in roles}
    counts = Counter(classes.values())
    common: int = max([wanted, *roles], key=lambda role: counts[classes[role]])
    return common


def shift_layers(model_chunks: list[Any], by: list[int]) -> None:
    """Add ``by[chunk]`` to the number of every layer of each chunk, and of the parts of a layer."""
    for chunk, delta in zip(model_chunks, by, strict=True):
        for module in chunk.modules() if delta else ():
            if isinstance(getattr(module, "layer_number", None), int):
                module.layer_number += delta


def renumber_buckets(model_chunks: list[Any]) -> None:
    """Update the only rank that DDP keeps as a number, by which it finds its own shard of a bucket
    (param_and_grad_buffer.py, _ParamAndGradBucketGroup)."""
    for chunk in model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            shards = getattr(group, "intra_distributed_optimizer_instance_group", None)
            if shards is not None:
                group.intra_distributed_optimizer_instance_rank = shards.rank()


def _chunks(args: Any) -> list[int | None]:
    virtual = args.virtual_pipeline_model_parallel_size
    return [None] if virtual is None else list(range(virtual))


def _layout(config: Any) -> list[list[list[Any]]] | None:
    """Return the layers of each model chunk of each stage, from --pipeline-model-parallel-layout.
    Megatron's functions know only the stage of this rank, and without groups no stage."""
    setting = getattr(config, "pipeline_model_parallel_layout", None)
    return setting.layout if setting else None


def _numbers(args: Any, config: Any, stage: int) -> list[int]:
    """Return the number of layers of each model chunk of a stage."""
    return [get_num_layers_to_build(config, chunk, stage) for chunk in _chunks(args)]


def _segments(args: Any, config: Any, pattern: str) -> list[str]:
    """Return the kinds of layers of all model chunks in the order of the model (Megatron's
    hybrid_layer_allocation.py, select_pipeline_segment)."""
    segments = pattern.split("/")[0].split("|")
    if len(segments) > 1 or not pattern:
        return segments
    kinds = iter(segments[0])
    counts = [_numbers(args, config, stage) for stage in range(args.pipeline_model_parallel_size)]
    return ["".join(itertools.islice(kinds, count)) for (count,) in counts]
