"""Everything that a run of the trainer depends on, checked as a whole before anything starts.

Each field of :class:`TrainerConfig` carries its help text; :mod:`.arguments` derives the command
line from the fields. Nothing here imports torch or Megatron.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    ffn_hidden_size: int | None = _flag(None, "model", "width of the MLP; default 4 x hidden size")
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
    hidden_dropout: float = _flag(0.1, "model", "dropout of hidden states")
    attention_dropout: float = _flag(0.1, "model", "dropout of attention weights")

    num_experts: int | None = _flag(None, "mixture of experts", "experts per layer")
    moe_ffn_hidden_size: int | None = _flag(
        None, "mixture of experts", "width of each expert; default: as MLP"
    )
    moe_router_topk: int = _flag(2, "mixture of experts", "experts per token")
    moe_router_score_function: str = _flag(
        "softmax", "mixture of experts", "router scores", choices=("softmax", "sigmoid")
    )
    moe_router_load_balancing_type: str = _flag(
        "aux_loss",
        "mixture of experts",
        "how load is balanced",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    )
    moe_aux_loss_coeff: float = _flag(0.01, "mixture of experts", "weight of the balancing loss")
    moe_z_loss_coeff: float | None = _flag(None, "mixture of experts", "weight of the z-loss")
    moe_router_enable_expert_bias: bool = _flag(
        False, "mixture of experts", "balance by a bias per expert, updated each iteration"
    )
    moe_router_bias_update_rate: float = _flag(
        1e-3, "mixture of experts", "step of the expert bias"
    )
    moe_input_jitter_eps: float | None = _flag(
        None, "mixture of experts", "multiply router input by noise in [1-eps, 1+eps]"
    )
    moe_token_dispatcher_type: str = _flag(
        "alltoall",
        "mixture of experts",
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
    loss_scale: float | None = _flag(None, "training", "constant loss scale; default: dynamic")
    initial_loss_scale: float = _flag(2.0**32, "training", "first dynamic loss scale")
    min_loss_scale: float = _flag(1.0, "training", "smallest dynamic loss scale")
    loss_scale_window: int = _flag(1000, "training", "iterations without overflow until it doubles")
    hysteresis: int = _flag(2, "training", "overflows until it is halved")

    lr: float = _flag(1e-3, "optimizer", "learning rate")
    min_lr: float = _flag(0.0, "optimizer", "learning rate at the end")
    lr_decay_style: str = _flag(
        "linear",
        "optimizer",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
    )
    lr_decay_iters: int | None = _flag(None, "optimizer", "length of the decay; default: all")
    lr_warmup_iters: int = _flag(0, "optimizer", "iterations until the full learning rate")
    weight_decay: float = _flag(0.01, "optimizer", "decoupled weight decay")
    clip_grad: float = _flag(1.0, "optimizer", "largest gradient norm; 0: no clipping")
    adam_beta1: float = _flag(0.9, "optimizer", "decay of the first moment")
    adam_beta2: float = _flag(0.999, "optimizer", "decay of the second moment")
    adam_eps: float = _flag(1e-8, "optimizer", "epsilon of Adam")

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
        _check_numbers(self)
        _check_model(self)
        _check_layout(self)
        for path in self.data:
            if not path.exists():
                raise BadArgumentsError(f"--data: no such file or folder: {path}")
        if self.save_interval is not None and self.save is None:
            raise BadArgumentsError("--save-interval needs --save FOLDER")

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
        expert_tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        one_expert_model = expert_tensor * self.expert_model_parallel_size * pipeline
        if world_size % one_expert_model:
            raise BadArgumentsError(
                f"{world_size} ranks do not divide into expert models of {one_expert_model}"
                f" (expert tensor {expert_tensor} x expert"
                f" {self.expert_model_parallel_size} x pipeline {pipeline})"
            )


_POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "num_distributed_optimizer_instances",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "log_interval",
    "eval_interval",
    "save_interval",
    "num_experts",
    "moe_router_topk",
    "loss_scale_window",
    "hysteresis",
    "lr",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "distributed_timeout_minutes",
)


def _check_numbers(config: TrainerConfig) -> None:
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise BadArgumentsError(f"{flag_name(name)} must be positive, got {value}")
    for name in ("seed", "weight_decay", "adam_eps"):
        if getattr(config, name) < 0:
            raise BadArgumentsError(
                f"{flag_name(name)} must not be negative, got {getattr(config, name)}"
            )
    for name in ("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2"):
        if not 0.0 <= getattr(config, name) < 1.0:
            raise BadArgumentsError(
                f"{flag_name(name)} must be in [0, 1), got {getattr(config, name)}"
            )
    if not 0.0 <= config.min_lr <= config.lr:
        raise BadArgumentsError(f"--min-lr {config.min_lr} must be between 0 and --lr {config.lr}")
    decay = config.lr_decay_iters or config.train_iters
    if config.lr_warmup_iters >= decay:
        raise BadArgumentsError(
            f"--lr-warmup-iters {config.lr_warmup_iters} must be below {decay}, where decay ends"
        )
    if config.fp16 and config.min_loss_scale > config.initial_loss_scale:
        raise BadArgumentsError(
            f"--min-loss-scale {config.min_loss_scale} exceeds --initial-loss-scale"
            f" {config.initial_loss_scale}"
        )
    if config.bf16 and config.fp16:
        raise BadArgumentsError("choose one of --bf16 and --fp16")


def _check_model(config: TrainerConfig) -> None:
    if config.vocab_size < SMALLEST_VOCABULARY:
        raise BadArgumentsError(
            f"--vocab-size {config.vocab_size} is too small: byte-level text needs"
            f" {SMALLEST_VOCABULARY}"
        )
    if config.num_experts is None:
        for name in ("moe_input_jitter_eps", "moe_z_loss_coeff", "moe_router_enable_expert_bias"):
            if getattr(config, name):
                raise BadArgumentsError(f"{flag_name(name)} needs --num-experts")
        if config.expert_model_parallel_size > 1:
            raise BadArgumentsError("--expert-model-parallel-size needs --num-experts")
        return
    _divides(config, "num_experts", "expert_model_parallel_size")
    if config.moe_router_topk > config.num_experts:
        raise BadArgumentsError(
            f"--moe-router-topk {config.moe_router_topk} exceeds --num-experts {config.num_experts}"
        )
    if config.moe_router_enable_expert_bias and config.moe_router_score_function != "sigmoid":
        raise BadArgumentsError(
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise BadArgumentsError("experts with tensor parallelism need --sequence-parallel")
    _check_expert_bias_terms(config)


def _check_expert_bias_terms(config: TrainerConfig) -> None:
    """Megatron's experts have bias terms only where nothing is reduced over tensor ranks."""
    if config.disable_bias_linear:
        return
    expert_tensor = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    if expert_tensor > 1:
        raise BadArgumentsError(
            "experts with tensor parallelism need --disable-bias-linear or"
            " --expert-tensor-parallel-size 1"
        )
    if config.expert_model_parallel_size == 1:
        raise BadArgumentsError(
            "experts without --expert-model-parallel-size above 1 need --disable-bias-linear"
        )


def _check_layout(config: TrainerConfig) -> None:
    _divides(config, "hidden_size", "num_attention_heads")
    _divides(config, "num_attention_heads", "tensor_model_parallel_size")
    _divides(config, "vocab_size", "tensor_model_parallel_size")
    _divides(config, "num_layers", "pipeline_model_parallel_size")
    if config.sequence_parallel:
        if config.tensor_model_parallel_size == 1:
            raise BadArgumentsError(
                "--sequence-parallel needs --tensor-model-parallel-size above 1"
            )
        _divides(config, "seq_length", "tensor_model_parallel_size")
    chunk = config.num_layers_per_virtual_pipeline_stage
    if chunk is not None:
        per_stage = config.num_layers // config.pipeline_model_parallel_size
        if config.pipeline_model_parallel_size == 1:
            raise BadArgumentsError(
                "--num-layers-per-virtual-pipeline-stage needs several pipeline stages"
            )
        if chunk < 1 or per_stage % chunk or per_stage == chunk:
            raise BadArgumentsError(
                f"--num-layers-per-virtual-pipeline-stage {chunk} does not split the {per_stage}"
                " layers of a stage into several equal chunks"
            )
    if not config.use_distributed_optimizer:
        if config.overlap_param_gather:
            raise BadArgumentsError("--overlap-param-gather needs --use-distributed-optimizer")
        if config.num_distributed_optimizer_instances > 1:
            raise BadArgumentsError(
                "--num-distributed-optimizer-instances needs --use-distributed-optimizer"
            )
    if config.overlap_param_gather and not config.overlap_grad_reduce:
        raise BadArgumentsError("--overlap-param-gather needs --overlap-grad-reduce")


def _divides(config: TrainerConfig, whole: str, part: str) -> None:
    if getattr(config, whole) % getattr(config, part):
        raise BadArgumentsError(
            f"{flag_name(whole)} {getattr(config, whole)} is not a multiple of"
            f" {flag_name(part)} {getattr(config, part)}"
        )


def flag_name(field_name: str) -> str:
    """The command-line flag of a field."""
    return "--" + field_name.replace("_", "-")
