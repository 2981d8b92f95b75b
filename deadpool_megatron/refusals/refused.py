"""Flags of Megatron-LM that a protected run cannot have, as a table: which flag, why, what instead.

Every flag of core_v0.16.1 was read for it, and of later versions those that stand in a row; what
nobody has read is refused by its name (:mod:`.unreviewed`). Three things lead into the table: state
that an iteration changes and no generation holds; memory or kernels that are bound to one
communicator; leftovers of an interrupted step that the next one trips over.

The arguments that Megatron has validated decide (:attr:`FlagRow.applies`). What can be read off the
command line (:meth:`FlagRow.is_named_in`) is refused before anything starts, which also helps where
Megatron acts on a flag before it validates.
"""

from __future__ import annotations

import argparse
import importlib.util

from deadpool_megatron.refusals.rows import FlagRow, above, among, begins, given, on, other_than

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
        on("inprocess_restart"),
        _OWN_RECOVERY,
        "leave it out: --deadpool takes its place",
    ),
    FlagRow(
        "--enable-ft-package",
        on("enable_ft_package"),
        "its monitor kills a rank whose step takes longer than a limit, and a recovery may; the"
        " limits are arguments of ft_launcher and cannot be seen from here",
        "leave it out: the agents watch the processes",
    ),
    FlagRow(
        "--adlr-autoresume",
        on("adlr_autoresume"),
        "it ends and restarts the job by itself",
        "leave it out: 'deadpool run --resume' goes on from an earlier run",
    ),
    FlagRow(
        "--error-injection-rate above 0",
        above("error_injection_rate", 0),
        "it injects errors to try the rerun machine, whose answer is to end the job",
        "leave it out, and use 'deadpool kill' to try recoveries",
    ),
    FlagRow(
        "--non-persistent-ckpt-type local",
        among("non_persistent_ckpt_type", "local"),
        "its checkpoints lie on the node that fails and are found by rank",
        "leave it out: every iteration is kept in the memory of other nodes",
    ),
    FlagRow(
        "--no-save-optim, --no-save-rng",
        on("no_save_optim", "no_save_rng"),
        "checkpoints are the last thing to fall back to, and these would be incomplete",
    ),
    FlagRow(
        "--save msc://...",
        begins("save", "msc://"),
        "what it has written cannot be looked at as files, so that no checkpoint would ever count",
        "use a directory of a shared file system, and copy from there",
    ),
    FlagRow(
        "--ckpt-format other than torch_dist",
        other_than("ckpt_format", "torch_dist"),
        "torch_dist is what a run can fall back to",
        "use --ckpt-format torch_dist",
    ),
)

STATE = (
    FlagRow(
        "--use-megatron-fsdp",
        on("use_megatron_fsdp", "use_custom_fsdp"),
        _FSDP,
        "use --use-distributed-optimizer",
    ),
    FlagRow("--use-torch-fsdp2", on("use_torch_fsdp2"), _FSDP, "use --use-distributed-optimizer"),
    FlagRow(
        "--optimizer other than adam",
        other_than("optimizer", "adam"),
        "there is no inventory of the optimizer's state",
        "use --optimizer adam",
    ),
    FlagRow(
        "--optimizer-cpu-offload",
        on("optimizer_cpu_offload"),
        "HybridDeviceOptimizer has no inventory of its state",
    ),
    FlagRow(
        "--qk-clip",
        on("qk_clip"),
        "it multiplies weights and their masters apart, and a recovery casts the weights from the"
        " masters: their last bits would differ",
        "leave it out; --qk-layernorm bounds the logits as well",
    ),
    FlagRow(
        "--overlap-param-gather-with-optimizer-step",
        on("overlap_param_gather_with_optimizer_step"),
        "a gather runs while parameters are updated, which was never tried with protection",
        "leave it out; --overlap-param-gather is fine",
    ),
    FlagRow(
        "--fp8-recipe custom",
        among("fp8_recipe", "custom"),
        f"fp8: {_SCALES}",
        "use one of the recipes of TransformerEngine",
    ),
    FlagRow("--fp4-format", on("fp4"), f"fp4: {_SCALES}", "use --bf16"),
    FlagRow(
        "--fp4-param-gather",
        on("fp4_param", "fp4_param_gather"),
        "weights in 4 bits are state of their own, which no generation holds",
    ),
    FlagRow(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        on("reuse_grad_buf_for_mxfp8_param_ag"),
        "parameters lie in the buffer of gradients, which a recovery empties",
    ),
    FlagRow(
        "--te-precision-config-file",
        on("te_precision_config_file"),
        f"it can choose fp8 or fp4 for any module: {_SCALES}",
    ),
    FlagRow(
        "--kitchen-config-file, --kitchen-recipe-number",
        lambda args: on("kitchen_config_file")(args) or given("kitchen_recipe_number")(args),
        f"its recipes quantise: {_SCALES}",
        only_with="kitchen",
    ),
    FlagRow(
        "--experimental-attention-variant dsa",
        among("experimental_attention_variant", "dsa"),
        "the running sums of its indexer's loss are kept outside of the model",
    ),
    FlagRow(
        "--is-hybrid-model, --hybrid-override-pattern, --hybrid-attention-ratio,"
        " --hybrid-mlp-ratio",
        on(
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
        on("moe_enable_routing_replay"),
        "its list of routers is the process's, and grows with every model that a spare builds",
    ),
    FlagRow(
        "--vision-pretraining",
        on("vision_pretraining"),
        "its teacher, its momentum and its feature bank are kept outside of the optimizer",
    ),
    FlagRow(
        "--perform-rl-step",
        on("perform_rl_step"),
        "rollouts, a second model and an inference engine are state that no generation holds",
    ),
)

COMMUNICATION = (
    FlagRow(
        "--hybrid-context-parallel",
        on("hybrid_context_parallel"),
        "its groups are chosen anew for each batch and kept outside of what is rebuilt",
        "use --context-parallel-size alone",
    ),
    FlagRow("--use-nccl-ub", on("nccl_ub"), _BOUND_BUFFERS),
    FlagRow("--symmetric-ar-type", on("symmetric_ar_type"), _BOUND_BUFFERS),
    FlagRow(
        "--transformer-impl inference_optimized",
        among("transformer_impl", "inference_optimized"),
        f"it uses symmetric memory: {_BOUND_BUFFERS}",
        "use --transformer-impl transformer_engine",
    ),
    FlagRow("--tp-comm-overlap", on("tp_comm_overlap"), f"user buffers: {_BOUND_BUFFERS}"),
    FlagRow(
        "--use-sharp",
        on("use_sharp"),
        "SHARP goes to the first communicator that a process makes, and a recovery makes new ones",
    ),
    FlagRow(
        "--moe-token-dispatcher-type flex, --moe-enable-deepep",
        lambda args: (
            among("moe_token_dispatcher_type", "flex")(args) or on("moe_enable_deepep")(args)
        ),
        f"DeepEP and Hybrid-EP: {_BOUND_BUFFERS}",
        "use --moe-token-dispatcher-type alltoall",
    ),
    FlagRow(
        "--overlap-moe-expert-parallel-comm",
        on("overlap_moe_expert_parallel_comm"),
        "it computes and communicates on streams of its own, which a recovery does not look at",
    ),
    FlagRow(
        "--distributed-backend other than nccl or gloo",
        other_than("distributed_backend", "nccl", "gloo"),
        "only their communicators can be replaced",
        "use --distributed-backend nccl",
    ),
    FlagRow(
        "--pipeline-model-parallel-comm-backend ucc",
        among("pipeline_model_parallel_comm_backend", "ucc"),
        "only communicators of NCCL and gloo can be replaced",
    ),
    FlagRow(
        "--use-ring-exchange-p2p",
        on("use_ring_exchange_p2p"),
        "it goes past the process groups that a recovery replaces",
    ),
    FlagRow(
        "--fake-process-group", on("fake_process_group"), "nothing is communicated: nothing trains"
    ),
    FlagRow(
        "--lazy-mpu-init",
        on("lazy_mpu_init"),
        "the process groups are made by somebody else, so they cannot be replaced",
    ),
    FlagRow(
        "--log-straggler",
        on("log_straggler"),
        "the detector keeps the rank that its process had first, and a spare takes over another",
    ),
)

LEFTOVERS = (
    FlagRow(
        "--cuda-graph-impl other than none, --enable-cuda-graph, --external-cuda-graph",
        lambda args: (
            other_than("cuda_graph_impl", "none", None)(args)
            or on("enable_cuda_graph", "external_cuda_graph")(args)
        ),
        "captured graphs hold the communicators and addresses of the moment of their capture",
    ),
    FlagRow(
        "--fine-grained-activation-offloading, --cpu-offloading-num-layers above 0",
        lambda args: (
            on("fine_grained_activation_offloading")(args)
            or above("cpu_offloading_num_layers", 0)(args)
        ),
        "the queues of its copies keep what an interrupted step has left in them",
        "leave it out; --recompute-granularity saves memory as well",
    ),
    FlagRow("--defer-embedding-wgrad-compute", on("defer_embedding_wgrad_compute"), _LEFTOVERS),
    FlagRow("--delay-wgrad-compute", on("delay_wgrad_compute"), _LEFTOVERS),
    FlagRow("--moe-shared-expert-overlap", on("moe_shared_expert_overlap"), _LEFTOVERS),
    FlagRow("--save-dgrads-interval", given("save_dgrads_interval"), _GRADIENTS),
    FlagRow("--save-wgrads-interval", given("save_wgrads_interval"), _GRADIENTS),
)

DATA = (
    FlagRow(
        "--dataloader-type external",
        among("dataloader_type", "external"),
        _POSITION,
        "use --dataloader-type single or cyclic",
    ),
    FlagRow(
        "--full-validation, --multiple-validation-sets",
        on("full_validation", "multiple_validation_sets"),
        _POSITION,
        "use --eval-iters",
    ),
    FlagRow(
        "--fim-data",
        on("fim_data"),
        "it draws from a generator inside of the data set, which no generation holds",
    ),
    FlagRow(
        "--phase-transition-iterations",
        on("phase_transition_iterations"),
        "data sets are cut for the phase in which a process starts, and spares start in the first",
    ),
    FlagRow(
        "--iterations-to-skip, --result-rejected-tracker-filename",
        on("iterations_to_skip", "result_rejected_tracker_filename"),
        "a skipped iteration consumes data and makes no step, so there is no generation of it",
    ),
)

OTHER = (
    FlagRow("--skip-train", on("skip_train"), "nothing is trained", "run it without --deadpool"),
    FlagRow(
        "--ckpt-convert-format",
        on("ckpt_convert_format"),
        "nothing is trained",
        "convert without --deadpool",
    ),
    FlagRow(
        "--moe-use-upcycling",
        on("moe_use_upcycling"),
        "the model is converted and saved before training, by spares as well",
        "convert without --deadpool, then train from what that has saved",
    ),
    FlagRow(
        "--profile, --run-workload-inspector-server",
        on("profile", "run_workload_inspector_server"),
        "train() starts it at each entry, and a recovery enters it again",
        "leave it out, or use it in a short run without --deadpool",
    ),
    FlagRow(
        "--async-strategy nvrx",
        lambda args: on("async_save")(args) and among("async_strategy", "nvrx")(args),
        "its writers and queues belong to another package, and a recovery does not reach them",
        "use --async-strategy mcore, which is not the default with --async-save",
        only_with="Megatron-LM 0.17",
    ),
    FlagRow(
        "--optimizer-cuda-graph",
        on("optimizer_cuda_graph"),
        "what is captured of a step is played again without asking whether the one before is kept",
        only_with="Megatron-LM 0.17",
    ),
    FlagRow(
        "--sft, from Megatron-LM 0.18 on",
        lambda args: on("sft")(args) and hasattr(args, "step_batch_size_schedule"),
        "lengths of sequences are summed over micro-batches until the step is over, and a step that"
        " is interrupted leaves sums",
        "pad the sequences, or use 0.17",
    ),
    FlagRow(
        "--yaml-cfg",
        on("yaml_cfg"),
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
