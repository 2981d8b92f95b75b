"""The configuration of the trainer, checked as a whole before anything starts.

The fields of :class:`TrainerConfig` have the names of Megatron's arguments, and a help text; the
command line has a flag for each field. This module imports neither torch nor Megatron, so that
``--help`` and error messages appear at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from deadpool_megatron.layout.grid import Division
from deadpool_megatron.planning.model_replicas import Workload

PROGRAM = "deadpool run [options] -- -m deadpool_megatron.trainer"
# A token is a byte.
SMALLEST_VOCABULARY = 256
_DESCRIPTION = """\
Pretrains a GPT on text with stock megatron-core. A token is a byte of it. Flags have Megatron's
names. @FILE reads flags from a file, with # comments.

  %(prog)s @configs/tiny.args --train-iters 100
  %(prog)s @configs/small.args --data README.md docs --bf16
"""

_POSITIVE_FIELDS = """
num_layers hidden_size num_attention_heads seq_length tensor_model_parallel_size
pipeline_model_parallel_size expert_model_parallel_size num_distributed_optimizer_instances
micro_batch_size global_batch_size train_iters log_interval eval_interval save_interval num_experts
hysteresis lr initial_loss_scale
"""
# Pairs of fields: if the first field differs from its default, the second must differ, too.
_REQUIREMENTS = """
overlap_param_gather use_distributed_optimizer
overlap_param_gather overlap_grad_reduce
num_distributed_optimizer_instances use_distributed_optimizer
sequence_parallel tensor_model_parallel_size
num_layers_per_virtual_pipeline_stage pipeline_model_parallel_size
moe_input_jitter_eps num_experts
moe_router_enable_expert_bias num_experts
moe_router_enable_expert_bias moe_router_score_function
expert_model_parallel_size num_experts
save_interval save
"""


class BadArgumentsError(ValueError):
    """Arguments that cannot work together; the message is a line that names the change to make."""


def _flag(default: Any, help_text: str, choices: str = "") -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices.split() or None})


@dataclass(frozen=True)
class TrainerConfig:
    """All values on which a run of the trainer depends: equal configs train equal bits."""

    num_layers: int = _flag(4, "transformer layers")
    hidden_size: int = _flag(64, "width of the residual stream")
    num_attention_heads: int = _flag(4, "attention heads")
    seq_length: int = _flag(64, "tokens per sample")
    vocab_size: int = _flag(512, f"rows of the embedding, at least {SMALLEST_VOCABULARY}")
    untie_embeddings_and_output_weights: bool = _flag(False, "separate weights for the output")
    disable_bias_linear: bool = _flag(False, "no bias in linear layers")

    num_experts: int | None = _flag(None, "experts per layer")
    moe_router_score_function: str = _flag("softmax", "router scores", "softmax sigmoid")
    moe_router_load_balancing_type: str = _flag(
        "aux_loss", "how load is balanced", "aux_loss seq_aux_loss global_aux_loss none"
    )
    moe_router_enable_expert_bias: bool = _flag(False, "balance by a bias per expert")
    moe_input_jitter_eps: float | None = _flag(None, "noise of the router's input, in 1 +- eps")

    tensor_model_parallel_size: int = _flag(1, "ranks that share each layer")
    pipeline_model_parallel_size: int = _flag(1, "pipeline stages")
    num_layers_per_virtual_pipeline_stage: int | None = _flag(None, "layers per model chunk")
    expert_model_parallel_size: int = _flag(1, "ranks that share the experts")
    sequence_parallel: bool = _flag(False, "split norms and dropout over tensor ranks")
    use_distributed_optimizer: bool = _flag(False, "shard the optimizer over data ranks")
    num_distributed_optimizer_instances: int = _flag(1, "copies of the sharded optimizer")
    overlap_grad_reduce: bool = _flag(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = _flag(False, "gather parameters during the forward pass")
    ddp_bucket_size: int | None = _flag(None, "parameters per gradient bucket")

    micro_batch_size: int = _flag(1, "samples per forward pass")
    global_batch_size: int = _flag(8, "samples per iteration")
    train_iters: int = _flag(20, "iterations")
    seed: int = _flag(1234, "seed of everything random")
    bf16: bool = _flag(False, "bfloat16 parameters, fp32 master copies")
    fp16: bool = _flag(False, "float16 parameters, fp32 master copies, loss scaling")
    initial_loss_scale: float = _flag(2.0**32, "first dynamic loss scale")
    hysteresis: int = _flag(2, "overflows until it is halved")

    lr: float = _flag(1e-3, "learning rate")
    min_lr: float = _flag(0.0, "learning rate at the end")
    lr_decay_style: str = _flag(
        "linear", "shape of the decay", "constant linear cosine inverse-square-root"
    )
    lr_warmup_iters: int = _flag(0, "iterations until the full learning rate")
    override_opt_param_scheduler: bool = _flag(False, "at --resume: these rates, not the state's")
    weight_decay: float = _flag(0.01, "decoupled weight decay")
    clip_grad: float = _flag(1.0, "largest gradient norm; 0: no clipping")

    data: tuple[Path, ...] = _flag((), "texts or folders; default: Python's standard library")

    log_interval: int = _flag(10, "iterations between log lines")
    eval_interval: int | None = _flag(None, "iterations between evaluations")
    eval_iters: int = _flag(2, "batches per evaluation")
    save: Path | None = _flag(None, "folder for checkpoints")  # noqa: RUF009
    save_interval: int | None = _flag(None, "iterations between checkpoints")
    load: Path | None = _flag(None, "where to start from; under deadpool run: --resume")  # noqa: RUF009

    def __post_init__(self) -> None:
        """Raise BadArgumentsError for errors that do not depend on the number of ranks."""
        if problem := next(_problems(self), ""):
            raise BadArgumentsError(problem)

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """The number of model chunks per pipeline stage; None for the plain schedule."""
        if self.num_layers_per_virtual_pipeline_stage is None:
            return None
        per_stage = self.num_layers // self.pipeline_model_parallel_size
        return per_stage // self.num_layers_per_virtual_pipeline_stage

    def num_microbatches(self, world_size: int) -> int:
        """Return the number of forward passes per iteration on each rank. Raises
        BadArgumentsError."""
        self.check_world_size(world_size)
        replicas = world_size // Workload.of(self).grid.ranks
        return self.global_batch_size // (self.micro_batch_size * replicas)

    def check_world_size(self, world_size: int) -> None:
        """Raise BadArgumentsError unless the layout fits exactly this many ranks."""
        work = Workload.of(self)
        ranks = Division("", work.grid.ranks, "number of ranks", world_size)
        if problem := ranks.problem or work.problem(world_size // work.grid.ranks):
            raise BadArgumentsError(problem)


def _problems(c: TrainerConfig) -> Iterator[str]:
    """Yield a line for each error, which names the change to make."""
    for name in _POSITIVE_FIELDS.split():
        if (value := getattr(c, name)) is not None and value <= 0:
            yield f"{flag_name(name)} must be positive, got {value}"
    if not 0.0 <= c.min_lr <= c.lr:
        yield f"--min-lr {c.min_lr} must be between 0 and --lr {c.lr}"
    if c.lr_warmup_iters >= c.train_iters:
        yield f"--lr-warmup-iters {c.lr_warmup_iters} must be below --train-iters {c.train_iters}"
    if c.bf16 and c.fp16:
        yield "choose one of --bf16 and --fp16"
    if c.vocab_size < SMALLEST_VOCABULARY:
        yield f"--vocab-size must be at least {SMALLEST_VOCABULARY}, got {c.vocab_size}"
    tensor = "tensor_model_parallel_size"
    for whole, part in (
        ("hidden_size", "num_attention_heads"),
        ("num_attention_heads", tensor),
        ("vocab_size", tensor),
        ("num_layers", "pipeline_model_parallel_size"),
        *([("seq_length", tensor)] if c.sequence_parallel else []),
        *([("num_experts", "expert_model_parallel_size")] if c.num_experts else []),
    ):
        size, divisor = getattr(c, whole), getattr(c, part)
        if size % divisor:
            yield f"{flag_name(whole)} {size} is not a multiple of {flag_name(part)} {divisor}"
    for name, needed in map(str.split, _REQUIREMENTS.strip().splitlines()):
        if _is_set(c, name) and not _is_set(c, needed):
            yield f"{flag_name(name)} needs {flag_name(needed)}"
    if (chunk := c.num_layers_per_virtual_pipeline_stage) is not None:
        per_stage = c.num_layers // c.pipeline_model_parallel_size
        if chunk < 1 or per_stage % chunk or per_stage == chunk:
            flag = flag_name("num_layers_per_virtual_pipeline_stage")
            yield f"{flag} {chunk} does not split the {per_stage} layers of a stage equally"
    if c.num_experts is not None:
        if _is_set(c, tensor) and not c.sequence_parallel:
            yield "experts with tensor parallelism need --sequence-parallel"
        # Megatron's experts have bias terms only without a reduction over tensor ranks.
        is_reduced = _is_set(c, tensor) or c.expert_model_parallel_size == 1
        if is_reduced and not c.disable_bias_linear:
            yield "experts need --disable-bias-linear, or --expert-model-parallel-size alone"
    for path in c.data:
        if not path.exists():
            yield f"--data: no such file or folder: {path}"


def _is_set(c: TrainerConfig, name: str) -> bool:
    return bool(getattr(c, name) != getattr(TrainerConfig, name))


def flag_name(field_name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + field_name.replace("_", "-")


class _OneLineParser(argparse.ArgumentParser):
    """A parser that reports a bad argument in a line, with exit status 2, and reads ``@file`` with
    comments."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"{arg_line.strip()}: {error}")


def build_parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    """Return a parser with a flag for each field of TrainerConfig; callers may add flags."""
    parser = _OneLineParser(
        prog=prog,
        usage="%(prog)s [@FILE ...] [flags]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    hints = get_type_hints(TrainerConfig)
    for entry in dataclasses.fields(TrainerConfig):
        flag, help_text = flag_name(entry.name), entry.metadata["help"]
        if hints[entry.name] is bool:
            parser.add_argument(flag, action="store_true", help=help_text)
            continue
        # The type of a single value, for T, T | None and tuple[T, ...].
        value_type: type = getattr(hints[entry.name], "__args__", (hints[entry.name],))[0]
        choices: list[str] | None = entry.metadata["choices"]
        parser.add_argument(
            flag,
            type=value_type,
            default=entry.default,
            nargs="+" if entry.default == () else None,
            choices=choices,
            metavar=None if choices else value_type.__name__,
            help=help_text + (f" (default: {entry.default})" if entry.default else ""),
        )
    return parser


def config_from(namespace: argparse.Namespace) -> TrainerConfig:
    """Return the config of parsed arguments. Raises BadArgumentsError."""
    values = {f.name: getattr(namespace, f.name) for f in dataclasses.fields(TrainerConfig)}
    return TrainerConfig(**{**values, "data": tuple(values["data"])})


def parse_args(argv: Sequence[str], world_size: int | None = None) -> TrainerConfig:
    """Return the config of a command line; print a line and exit with 2 for bad arguments.

    With the ``world_size`` of a protected run, also check that the layout fits it.
    """
    parser = build_parser()
    try:
        namespace = parser.parse_args(argv)
    except UnicodeDecodeError as error:
        parser.error(f"an argument file is no text: {error}")
    try:
        config = config_from(namespace)
        if world_size is not None:
            config.check_world_size(world_size)
            if config.load is not None:
                raise BadArgumentsError("--load: continue with deadpool run --resume instead")
        return config
    except BadArgumentsError as error:
        parser.error(str(error))
