"""Everything that a run of the trainer depends on, checked as a whole before anything starts.

Each field of :class:`TrainerConfig` carries its help text; :mod:`.arguments` derives the command
line from the fields. Nothing here imports torch or Megatron.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EXPERTS = "mixture of experts"
# Bytes 0-255, one end-of-document token, one padding token.
SMALLEST_VOCABULARY = 258


class BadArgumentsError(ValueError):
    """Arguments that cannot work together; the message is one line that says what to change."""


def _facts(group: str, help_text: str, **extra: Any) -> dict[str, Any]:
    return {"group": group, "help": help_text, **extra}


def _flag(default: Any, group: str, help_text: str, **extra: Any) -> Any:
    return field(default=default, metadata=_facts(group, help_text, **extra))


def _default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "deadpool-megatron" / "data"


@dataclass(frozen=True)
class TrainerConfig:
    """Everything a run of the trainer depends on. Frozen: equal configs train equal bits."""

    num_layers: int = _flag(4, "model", "transformer layers")
    hidden_size: int = _flag(64, "model", "width of the residual stream")
    num_attention_heads: int = _flag(4, "model", "attention heads")
    seq_length: int = _flag(64, "model", "tokens per sample")
    vocab_size: int = _flag(
        512, "model", f"rows of the embedding; text is bytes and needs {SMALLEST_VOCABULARY}"
    )
    position_embedding_type: str = _flag(
        "learned_absolute", "model", "position embedding", choices=("learned_absolute", "rope")
    )
    untie_embeddings_and_output_weights: bool = _flag(
        False, "model", "separate weights for the output layer"
    )
    disable_bias_linear: bool = _flag(False, "model", "no bias in linear layers")

    num_experts: int | None = _flag(None, _EXPERTS, "experts per layer")
    moe_router_score_function: str = _flag(
        "softmax", _EXPERTS, "router scores", choices=("softmax", "sigmoid")
    )
    moe_router_load_balancing_type: str = _flag(
        "aux_loss",
        _EXPERTS,
        "how load is balanced",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    )
    moe_router_enable_expert_bias: bool = _flag(
        False, _EXPERTS, "balance by a bias per expert, updated each iteration"
    )
    moe_input_jitter_eps: float | None = _flag(
        None, _EXPERTS, "multiply router input by noise in [1-eps, 1+eps]"
    )
    moe_token_dispatcher_type: str = _flag(
        "alltoall",
        _EXPERTS,
        "how tokens travel to experts",
        choices=("alltoall", "allgather"),
    )

    tensor_model_parallel_size: int = _flag(1, "layout", "ranks that share each layer")
    pipeline_model_parallel_size: int = _flag(1, "layout", "pipeline stages")
    num_layers_per_virtual_pipeline_stage: int | None = _flag(
        None, "layout", "layers per model chunk of the interleaved schedule"
    )
    expert_model_parallel_size: int = _flag(1, "layout", "ranks that share the experts")
    expert_tensor_parallel_size: int | None = _flag(
        None, "layout", "ranks that share each expert; default: as other layers"
    )
    sequence_parallel: bool = _flag(False, "layout", "split norms and dropout over tensor ranks")
    use_distributed_optimizer: bool = _flag(False, "layout", "shard the optimizer over data ranks")
    num_distributed_optimizer_instances: int = _flag(
        1, "layout", "replicate the sharded optimizer this many times"
    )
    overlap_grad_reduce: bool = _flag(False, "layout", "reduce gradients during the backward pass")
    overlap_param_gather: bool = _flag(False, "layout", "gather parameters during the forward pass")
    ddp_bucket_size: int | None = _flag(None, "layout", "parameters per gradient bucket")

    micro_batch_size: int = _flag(1, "training", "samples per forward pass")
    global_batch_size: int = _flag(8, "training", "samples per iteration")
    train_iters: int = _flag(20, "training", "iterations")
    seed: int = _flag(1234, "training", "seed of everything random")
    bf16: bool = _flag(False, "training", "bfloat16 parameters, fp32 master copies")
    fp16: bool = _flag(False, "training", "float16 parameters, fp32 master copies, loss scaling")
    initial_loss_scale: float = _flag(2.0**32, "training", "first dynamic loss scale")
    hysteresis: int = _flag(2, "training", "overflows until it is halved")

    lr: float = _flag(1e-3, "optimizer", "learning rate")
    min_lr: float = _flag(0.0, "optimizer", "learning rate at the end")
    lr_decay_style: str = _flag(
        "linear",
        "optimizer",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
    )
    lr_warmup_iters: int = _flag(0, "optimizer", "iterations until the full learning rate")
    weight_decay: float = _flag(0.01, "optimizer", "decoupled weight decay")
    clip_grad: float = _flag(1.0, "optimizer", "largest gradient norm; 0: no clipping")

    data: tuple[Path, ...] = _flag(
        (),
        "data",
        "text files or folders; default: the source of Python's standard library",
        nargs="+",
    )
    data_cache_path: Path = field(
        default_factory=_default_cache,
        metadata=_facts("data", "where token files are kept between runs"),
    )

    log_interval: int = _flag(10, "output", "iterations between log lines")
    eval_interval: int | None = _flag(None, "output", "iterations between evaluations")
    eval_iters: int = _flag(2, "output", "batches per evaluation")
    save: Path | None = field(default=None, metadata=_facts("output", "folder for checkpoints"))
    save_interval: int | None = _flag(None, "output", "iterations between checkpoints")
    load: Path | None = field(
        default=None, metadata=_facts("output", "folder whose newest checkpoint to start from")
    )
    distributed_timeout_minutes: float = _flag(
        10.0, "output", "limit for one communication operation"
    )

    def __post_init__(self) -> None:
        """Raise BadArgumentsError for anything that is wrong whatever the number of ranks."""
        if problem := next(_problems(self), ""):
            raise BadArgumentsError(problem)

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Model chunks per pipeline stage, or None for the plain schedule."""
        if self.num_layers_per_virtual_pipeline_stage is None:
            return None
        per_stage = self.num_layers // self.pipeline_model_parallel_size
        return per_stage // self.num_layers_per_virtual_pipeline_stage

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model among ``world_size`` ranks. Raises BadArgumentsError."""
        one_model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % one_model:
            raise BadArgumentsError(
                f"{world_size} ranks do not divide into models of {one_model} (tensor"
                f" {self.tensor_model_parallel_size} x pipeline"
                f" {self.pipeline_model_parallel_size})"
            )
        return world_size // one_model

    def num_microbatches(self, world_size: int) -> int:
        """Forward passes per iteration on each rank. Raises BadArgumentsError."""
        per_pass = self.micro_batch_size * self.data_parallel_size(world_size)
        if self.global_batch_size % per_pass:
            raise BadArgumentsError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of micro batch"
                f" {self.micro_batch_size} x data-parallel {per_pass // self.micro_batch_size}"
            )
        return self.global_batch_size // per_pass

    def check_world_size(self, world_size: int) -> None:
        """Raise BadArgumentsError unless the layout fits exactly this many ranks."""
        data = self.data_parallel_size(world_size)
        microbatches = self.num_microbatches(world_size)
        pipeline = self.pipeline_model_parallel_size
        if self.num_layers_per_virtual_pipeline_stage is not None and microbatches % pipeline:
            raise BadArgumentsError(
                f"the interleaved schedule needs a multiple of {pipeline} micro batches per"
                f" iteration, got {microbatches}: change --global-batch-size"
            )
        if data % self.num_distributed_optimizer_instances:
            raise BadArgumentsError(
                f"--num-distributed-optimizer-instances {self.num_distributed_optimizer_instances}"
                f" does not divide data-parallel size {data}"
            )
        one_expert_model = self.expert_tensor_size * self.expert_model_parallel_size * pipeline
        if world_size % one_expert_model:
            raise BadArgumentsError(
                f"{world_size} ranks do not divide into expert models of {one_expert_model}"
                f" (expert tensor {self.expert_tensor_size} x expert"
                f" {self.expert_model_parallel_size} x pipeline {pipeline})"
            )


_POSITIVE = """
num_layers hidden_size num_attention_heads seq_length tensor_model_parallel_size
pipeline_model_parallel_size expert_model_parallel_size num_distributed_optimizer_instances
micro_batch_size global_batch_size train_iters log_interval eval_interval save_interval num_experts
hysteresis lr initial_loss_scale distributed_timeout_minutes
"""


def _problems(c: TrainerConfig) -> Iterator[str]:
    """Yield a line for each thing that is wrong, which says what to change."""
    for name in _POSITIVE.split():
        if (value := getattr(c, name)) is not None and value <= 0:
            yield f"{flag_name(name)} must be positive, got {value}"
    for name in ("seed", "weight_decay"):
        if (value := getattr(c, name)) < 0:
            yield f"{flag_name(name)} must not be negative, got {value}"
    if not 0.0 <= c.min_lr <= c.lr:
        yield f"--min-lr {c.min_lr} must be between 0 and --lr {c.lr}"
    if c.lr_warmup_iters >= c.train_iters:
        yield f"--lr-warmup-iters {c.lr_warmup_iters} must be below --train-iters {c.train_iters}"
    if c.bf16 and c.fp16:
        yield "choose one of --bf16 and --fp16"
    least = SMALLEST_VOCABULARY
    if c.vocab_size < least:
        yield f"--vocab-size {c.vocab_size} is too small: byte-level text needs {least}"
    yield from _problems_of_experts(c)
    yield from _multiple(c, "hidden_size", "num_attention_heads")
    for name in ("num_attention_heads", "vocab_size"):
        yield from _multiple(c, name, "tensor_model_parallel_size")
    yield from _multiple(c, "num_layers", "pipeline_model_parallel_size")
    if c.sequence_parallel:
        if c.tensor_model_parallel_size == 1:
            yield "--sequence-parallel needs --tensor-model-parallel-size above 1"
        yield from _multiple(c, "seq_length", "tensor_model_parallel_size")
    if (chunk := c.num_layers_per_virtual_pipeline_stage) is not None:
        flag = f"--num-layers-per-virtual-pipeline-stage {chunk}"
        per_stage = c.num_layers // c.pipeline_model_parallel_size
        if c.pipeline_model_parallel_size == 1:
            yield f"{flag} needs several pipeline stages"
        if chunk < 1 or per_stage % chunk or per_stage == chunk:
            yield f"{flag} does not split the {per_stage} layers of a stage into equal chunks"
    if c.overlap_param_gather and not c.use_distributed_optimizer:
        yield "--overlap-param-gather needs --use-distributed-optimizer"
    if c.num_distributed_optimizer_instances > 1 and not c.use_distributed_optimizer:
        yield "--num-distributed-optimizer-instances needs --use-distributed-optimizer"
    if c.overlap_param_gather and not c.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce"
    for path in c.data:
        if not path.exists():
            yield f"--data: no such file or folder: {path}"
    if c.save_interval is not None and c.save is None:
        yield "--save-interval needs --save FOLDER"


def _problems_of_experts(c: TrainerConfig) -> Iterator[str]:
    if c.num_experts is None:
        for name in ("moe_input_jitter_eps", "moe_router_enable_expert_bias"):
            if getattr(c, name):
                yield f"{flag_name(name)} needs --num-experts"
        if c.expert_model_parallel_size > 1:
            yield "--expert-model-parallel-size needs --num-experts"
        return
    yield from _multiple(c, "num_experts", "expert_model_parallel_size")
    if c.moe_router_enable_expert_bias and c.moe_router_score_function != "sigmoid":
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"
    if c.tensor_model_parallel_size > 1 and not c.sequence_parallel:
        yield "experts with tensor parallelism need --sequence-parallel"
    # Megatron's experts have bias terms only where nothing is reduced over tensor ranks.
    reduced = c.expert_tensor_size > 1 or c.expert_model_parallel_size == 1
    if reduced and not c.disable_bias_linear:
        yield (
            "experts need --disable-bias-linear, or --expert-tensor-parallel-size 1 and"
            " --expert-model-parallel-size above 1"
        )


def _multiple(c: TrainerConfig, whole: str, part: str) -> Iterator[str]:
    if getattr(c, whole) % getattr(c, part):
        yield (
            f"{flag_name(whole)} {getattr(c, whole)} is not a multiple of"
            f" {flag_name(part)} {getattr(c, part)}"
        )


def flag_name(field_name: str) -> str:
    """The command-line flag of a field."""
    return "--" + field_name.replace("_", "-")
