"""What Megatron-LM can do that a protected run cannot, as a table: which flag, why, what instead.

Read with core_v0.16.1 open. Three things lead into the table: state that an iteration changes and
no generation holds; memory or kernels that are bound to one communicator; leftovers of an
interrupted step that the next one trips over.

A flag without a row passes when :mod:`.reviewed_flags` has it among those that somebody has looked
at. Any other is refused by its name (:func:`unreviewed`), unless the user answers for it.

The arguments that Megatron has validated decide (:attr:`FlagRow.applies`). What can be read off the
command line (:meth:`FlagRow.is_named_in`) is refused before anything starts, which also helps where
Megatron acts on a flag before it validates.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from deadpool_megatron.reviewed_flags import REVIEWED, UNREVIEWED, UNREVIEWED_SCRIPTS

#: lets one unreviewed flag through, by its name without dashes; may be given several times
ALLOW_UNREVIEWED = "--deadpool-allow-unreviewed"


@dataclass(frozen=True)
class FlagRow:
    """One row. ``shown``: the flags that lead here, as a user writes them, all of 0.16.1's parser.

    ``only_with``: the package without which the parser does not know the flags.
    """

    shown: str
    applies: Callable[[argparse.Namespace], bool]
    reason: str
    remedy: str = "leave it out"
    only_with: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of :attr:`shown`, without values."""
        return tuple(re.findall(r"--[a-z0-9-]+", self.shown))

    @property
    def line(self) -> str:
        """What the user is told."""
        return f"{self.shown} cannot be protected: {self.reason}; {self.remedy}"

    def is_named_in(self, argv: Sequence[str]) -> bool:
        """Whether this can be told from the command line alone."""
        words = [word for argument in argv for word in _split(argument)]
        return not set(words).isdisjoint(self.shown.split(", ")) or self.applies(_said(words))


def _split(argument: str) -> list[str]:
    """``--flag=value`` is ``--flag value``."""
    return argument.split("=", 1) if argument.startswith("--") else [argument]


def _said(words: Sequence[str]) -> argparse.Namespace:
    """Each flag with the word behind it, for flags whose argument has their name."""
    named = {
        flag.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
        for flag, value in itertools.pairwise(words)
        if flag.startswith("--")
    }
    return argparse.Namespace(**named)


def complaint(rows: Iterable[FlagRow]) -> str:
    """One line about all of these; empty when there are none."""
    found = list(rows)
    if not found:
        return ""
    others = ", ".join(row.shown for row in found[1:])
    return found[0].line + (f" (refused as well: {others})" if others else "")


def unreviewed(argv: Sequence[str]) -> str:
    """One line about what is on the command line of a script that nobody vouches for; empty when
    there is nothing. Look at :data:`REFUSED` first: its rows have better advice."""
    answered_for = set(allowed(argv))
    found = [name for name in _unvouched(argv) if name.lstrip("-") not in answered_for]
    if not found:
        return ""
    first = found[0]
    others = f" (unreviewed as well: {', '.join(found[1:])})" if found[1:] else ""
    return (
        f"{first} is not reviewed: {_why_unreviewed(first)}; leave it out, or answer for it"
        f" yourself with {ALLOW_UNREVIEWED} {first.lstrip('-')}{others}"
    )


def let_through(argv: Sequence[str]) -> list[str]:
    """Returns what is unreviewed and on the command line all the same, for the log."""
    answered_for = set(allowed(argv))
    return [name for name in _unvouched(argv) if name.lstrip("-") in answered_for]


def allowed(argv: Sequence[str]) -> list[str]:
    """Returns the names that a command line gives behind :data:`ALLOW_UNREVIEWED`."""
    words = [word for argument in argv for word in _split(argument)]
    return [
        value.lstrip("-") for flag, value in itertools.pairwise(words) if flag == ALLOW_UNREVIEWED
    ]


def one_logger_complaint(args: argparse.Namespace) -> str:
    """One line where Megatron-LM would open one_logger; empty where it would not.

    Megatron opens it in each pass, also for a spare, wherever the package is there.
    """
    if not getattr(args, "enable_one_logger", False) or not _is_installed("one_logger"):
        return ""
    return (
        "one_logger cannot be protected: each process of a spare would open it as the last rank;"
        " give --no-one-logger"
    )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _unvouched(argv: Sequence[str]) -> list[str]:
    """Returns the script, if it is one of Megatron-LM's that was never tried, and each flag that is
    neither reviewed, nor in a row, nor of deadpool itself."""
    script = [PurePath(argv[0]).name] if argv else []
    flags = [_split(argument)[0] for argument in argv[1:]]
    known = {flag for row in REFUSED for flag in row.flags}
    known |= {flag for family in REVIEWED for flag in family.flags}
    return [
        *(name for name in script if name in UNREVIEWED_SCRIPTS),
        *dict.fromkeys(
            flag
            for flag in flags
            if flag.startswith("--")
            and flag not in known
            and not flag.startswith("--deadpool-")
            and flag != "--deadpool"
        ),
    ]


def _why_unreviewed(name: str) -> str:
    if not name.startswith("--"):
        return "only pretrain_gpt.py was ever run under protection"
    reasons = (family.reason for family in UNREVIEWED if name in family.flags)
    return next(reasons, "nobody has looked at what it does to state, communicators and streams")


def _on(*names: str) -> Callable[[argparse.Namespace], bool]:
    """One of these arguments is set, to anything that is not empty."""
    return lambda args: any(getattr(args, name, None) for name in names)


def _given(name: str) -> Callable[[argparse.Namespace], bool]:
    """The argument is set; zero counts."""
    return lambda args: getattr(args, name, None) is not None


def _above(name: str, most: int) -> Callable[[argparse.Namespace], bool]:
    def applies(args: argparse.Namespace) -> bool:
        value = getattr(args, name, None)
        return isinstance(value, int) and value > most

    return applies


def _among(name: str, *values: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: getattr(args, name, None) in values


def _begins(name: str, start: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: str(getattr(args, name, None) or "").startswith(start)


def _other_than(name: str, *values: str | None) -> Callable[[argparse.Namespace], bool]:
    """Arguments that a version does not have count as not set."""
    return lambda args: getattr(args, name, values[0]) not in values


_OWN_RECOVERY = "it recovers from failures in its own way, and both would act on the same failure"
_SCALES = "scaling factors live outside of module buffers, so a recovery would lose them"
_BOUND_BUFFERS = "its buffers are registered with communicators, which a recovery replaces"
_FSDP = "the parameters are sharded, and no generation holds the shards"
_LEFTOVERS = "an interrupted step leaves half of its work in the modules, for the next one to find"
_POSITION = "no counter holds the position in its data, so a recovery would go on from another"
_GRADIENTS = (
    "its hooks stay on the model when a step is interrupted, and spares warm up with a step of"
    " made-up numbers"
)

RECOVERY = (
    FlagRow(
        "--inprocess-restart",
        _on("inprocess_restart"),
        _OWN_RECOVERY,
        "leave it out: --deadpool takes its place",
    ),
    FlagRow(
        "--enable-ft-package",
        _on("enable_ft_package"),
        "its monitor kills a rank whose step takes longer than a limit, and a recovery may; the"
        " limits are arguments of ft_launcher and cannot be seen from here",
        "leave it out: the agents watch the processes",
    ),
    FlagRow(
        "--adlr-autoresume",
        _on("adlr_autoresume"),
        "it ends and restarts the job by itself",
        "leave it out: 'deadpool run --resume' goes on from an earlier run",
    ),
    FlagRow(
        "--error-injection-rate above 0",
        _above("error_injection_rate", 0),
        "it injects errors to try the rerun machine, whose answer is to end the job",
        "leave it out, and use 'deadpool kill' to try recoveries",
    ),
    FlagRow(
        "--non-persistent-ckpt-type local",
        _among("non_persistent_ckpt_type", "local"),
        "its checkpoints lie on the node that fails and are found by rank",
        "leave it out: every iteration is kept in the memory of other nodes",
    ),
    FlagRow(
        "--no-save-optim, --no-save-rng",
        _on("no_save_optim", "no_save_rng"),
        "checkpoints are the last thing to fall back to, and these would be incomplete",
    ),
    FlagRow(
        "--save msc://...",
        _begins("save", "msc://"),
        "what it has written cannot be looked at as files, so that no checkpoint would ever count",
        "use a directory of a shared file system, and copy from there",
    ),
    FlagRow(
        "--ckpt-format other than torch_dist",
        _other_than("ckpt_format", "torch_dist"),
        "torch_dist is what a run can fall back to",
        "use --ckpt-format torch_dist",
    ),
)

STATE = (
    FlagRow(
        "--use-megatron-fsdp",
        _on("use_megatron_fsdp", "use_custom_fsdp"),
        _FSDP,
        "use --use-distributed-optimizer",
    ),
    FlagRow("--use-torch-fsdp2", _on("use_torch_fsdp2"), _FSDP, "use --use-distributed-optimizer"),
    FlagRow(
        "--optimizer other than adam",
        _other_than("optimizer", "adam"),
        "there is no inventory of the optimizer's state",
        "use --optimizer adam",
    ),
    FlagRow(
        "--optimizer-cpu-offload",
        _on("optimizer_cpu_offload"),
        "HybridDeviceOptimizer has no inventory of its state",
    ),
    FlagRow(
        "--overlap-param-gather-with-optimizer-step",
        _on("overlap_param_gather_with_optimizer_step"),
        "a gather runs while parameters are updated, which was never tried with protection",
        "leave it out; --overlap-param-gather is fine",
    ),
    FlagRow(
        "--fp8-recipe custom",
        _among("fp8_recipe", "custom"),
        f"fp8: {_SCALES}",
        "use one of the recipes of TransformerEngine",
    ),
    FlagRow("--fp4-format", _on("fp4"), f"fp4: {_SCALES}", "use --bf16"),
    FlagRow(
        "--fp4-param-gather",
        _on("fp4_param"),
        "weights in 4 bits are state of their own, which no generation holds",
    ),
    FlagRow(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        _on("reuse_grad_buf_for_mxfp8_param_ag"),
        "parameters lie in the buffer of gradients, which a recovery empties",
    ),
    FlagRow(
        "--te-precision-config-file",
        _on("te_precision_config_file"),
        f"it can choose fp8 or fp4 for any module: {_SCALES}",
    ),
    FlagRow(
        "--kitchen-config-file, --kitchen-recipe-number",
        lambda args: _on("kitchen_config_file")(args) or _given("kitchen_recipe_number")(args),
        f"its recipes quantise: {_SCALES}",
        only_with="kitchen",
    ),
    FlagRow(
        "--experimental-attention-variant dsa",
        _among("experimental_attention_variant", "dsa"),
        "the running sums of its indexer's loss are kept outside of the model",
    ),
    FlagRow(
        "--is-hybrid-model, --hybrid-override-pattern, --hybrid-attention-ratio,"
        " --hybrid-mlp-ratio",
        _on(
            "is_hybrid_model",
            "hybrid_override_pattern",
            "hybrid_attention_ratio",
            "hybrid_mlp_ratio",
        ),
        "stages have layers of different kinds, and a spare would take over one that differs",
        "train a model of attention layers",
    ),
    FlagRow(
        "--moe-enable-routing-replay",
        _on("moe_enable_routing_replay"),
        "its list of routers is the process's, and grows with every model that a spare builds",
    ),
    FlagRow(
        "--vision-pretraining",
        _on("vision_pretraining"),
        "its teacher, its momentum and its feature bank are kept outside of the optimizer",
    ),
    FlagRow(
        "--perform-rl-step",
        _on("perform_rl_step"),
        "rollouts, a second model and an inference engine are state that no generation holds",
    ),
)

COMMUNICATION = (
    FlagRow(
        "--hybrid-context-parallel",
        _on("hybrid_context_parallel"),
        "its groups are chosen anew for each batch and kept outside of what is rebuilt",
        "use --context-parallel-size alone",
    ),
    FlagRow("--use-nccl-ub", _on("nccl_ub"), _BOUND_BUFFERS),
    FlagRow("--symmetric-ar-type", _on("symmetric_ar_type"), _BOUND_BUFFERS),
    FlagRow(
        "--transformer-impl inference_optimized",
        _among("transformer_impl", "inference_optimized"),
        f"it uses symmetric memory: {_BOUND_BUFFERS}",
        "use --transformer-impl transformer_engine",
    ),
    FlagRow("--tp-comm-overlap", _on("tp_comm_overlap"), f"user buffers: {_BOUND_BUFFERS}"),
    FlagRow(
        "--use-sharp",
        _on("use_sharp"),
        "SHARP goes to the first communicator that a process makes, and a recovery makes new ones",
    ),
    FlagRow(
        "--moe-token-dispatcher-type flex, --moe-enable-deepep",
        lambda args: (
            _among("moe_token_dispatcher_type", "flex")(args) or _on("moe_enable_deepep")(args)
        ),
        f"DeepEP and Hybrid-EP: {_BOUND_BUFFERS}",
        "use --moe-token-dispatcher-type alltoall",
    ),
    FlagRow(
        "--overlap-moe-expert-parallel-comm",
        _on("overlap_moe_expert_parallel_comm"),
        "it computes and communicates on streams of its own, which a recovery does not look at",
    ),
    FlagRow(
        "--distributed-backend other than nccl or gloo",
        _other_than("distributed_backend", "nccl", "gloo"),
        "only their communicators can be replaced",
        "use --distributed-backend nccl",
    ),
    FlagRow(
        "--pipeline-model-parallel-comm-backend ucc",
        _among("pipeline_model_parallel_comm_backend", "ucc"),
        "only communicators of NCCL and gloo can be replaced",
    ),
    FlagRow(
        "--use-ring-exchange-p2p",
        _on("use_ring_exchange_p2p"),
        "it goes past the process groups that a recovery replaces",
    ),
    FlagRow(
        "--fake-process-group", _on("fake_process_group"), "nothing is communicated: nothing trains"
    ),
    FlagRow(
        "--lazy-mpu-init",
        _on("lazy_mpu_init"),
        "the process groups are made by somebody else, so they cannot be replaced",
    ),
    FlagRow(
        "--log-straggler",
        _on("log_straggler"),
        "the detector keeps the rank that its process had first, and a spare takes over another",
    ),
)

LEFTOVERS = (
    FlagRow(
        "--cuda-graph-impl other than none, --enable-cuda-graph, --external-cuda-graph",
        lambda args: (
            _other_than("cuda_graph_impl", "none", None)(args)
            or _on("enable_cuda_graph", "external_cuda_graph")(args)
        ),
        "captured graphs hold the communicators and addresses of the moment of their capture",
    ),
    FlagRow(
        "--fine-grained-activation-offloading, --cpu-offloading-num-layers above 0",
        lambda args: (
            _on("fine_grained_activation_offloading")(args)
            or _above("cpu_offloading_num_layers", 0)(args)
        ),
        "the queues of its copies keep what an interrupted step has left in them",
        "leave it out; --recompute-granularity saves memory as well",
    ),
    FlagRow("--defer-embedding-wgrad-compute", _on("defer_embedding_wgrad_compute"), _LEFTOVERS),
    FlagRow("--delay-wgrad-compute", _on("delay_wgrad_compute"), _LEFTOVERS),
    FlagRow("--moe-shared-expert-overlap", _on("moe_shared_expert_overlap"), _LEFTOVERS),
    FlagRow("--save-dgrads-interval", _given("save_dgrads_interval"), _GRADIENTS),
    FlagRow("--save-wgrads-interval", _given("save_wgrads_interval"), _GRADIENTS),
)

DATA = (
    FlagRow(
        "--dataloader-type external",
        _among("dataloader_type", "external"),
        _POSITION,
        "use --dataloader-type single or cyclic",
    ),
    FlagRow(
        "--full-validation, --multiple-validation-sets",
        _on("full_validation", "multiple_validation_sets"),
        _POSITION,
        "use --eval-iters",
    ),
    FlagRow(
        "--fim-data",
        _on("fim_data"),
        "it draws from a generator inside of the data set, which no generation holds",
    ),
    FlagRow(
        "--phase-transition-iterations",
        _on("phase_transition_iterations"),
        "data sets are cut for the phase in which a process starts, and spares start in the first",
    ),
    FlagRow(
        "--iterations-to-skip, --result-rejected-tracker-filename",
        _on("iterations_to_skip", "result_rejected_tracker_filename"),
        "a skipped iteration consumes data and makes no step, so there is no generation of it",
    ),
)

OTHER = (
    FlagRow("--skip-train", _on("skip_train"), "nothing is trained", "run it without --deadpool"),
    FlagRow(
        "--ckpt-convert-format",
        _on("ckpt_convert_format"),
        "nothing is trained",
        "convert without --deadpool",
    ),
    FlagRow(
        "--moe-use-upcycling",
        _on("moe_use_upcycling"),
        "the model is converted and saved before training, by spares as well",
        "convert without --deadpool, then train from what that has saved",
    ),
    FlagRow(
        "--profile, --run-workload-inspector-server",
        _on("profile", "run_workload_inspector_server"),
        "train() starts it at each entry, and a recovery enters it again",
        "leave it out, or use it in a short run without --deadpool",
    ),
    FlagRow(
        "--yaml-cfg",
        _on("yaml_cfg"),
        "the file replaces the whole command line, --deadpool included",
        "give flags",
    ),
)

#: All rows, in the order in which they are looked at.
REFUSED: tuple[FlagRow, ...] = (*RECOVERY, *LEFTOVERS, *STATE, *COMMUNICATION, *DATA, *OTHER)


def as_markdown() -> str:
    """The table for people."""
    rows = [f"| {_code(row.shown)} | {row.reason} | {row.remedy} |" for row in REFUSED]
    return "\n".join(("| flag | why | instead |", "| --- | --- | --- |", *rows)) + "\n"


def _code(shown: str) -> str:
    return ", ".join(f"`{part}`" for part in shown.split(", "))
