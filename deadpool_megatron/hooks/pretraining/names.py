"""Names in Megatron-LM that the hooks rely on: one table, and whether a source has all of it.

A version that was never tried is held against it at the start of a run. Nothing of Megatron is
imported for that: the source is read, so that what methods set on ``self`` is seen as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deadpool_megatron.hookpoints import POINTS, points_of

#: as MAJOR.MINOR, the newest last
VERSIONS = ("0.16", "0.17", "0.18", "0.19")
_UP_TO_0_17 = ("0.16", "0.17")
_UP_TO_0_18 = ("0.16", "0.17", "0.18")
_SINCE_0_17 = ("0.17", "0.18", "0.19")
_SINCE_0_18 = ("0.18", "0.19")
_SINCE_0_19 = ("0.19",)

_BUCKETS = "megatron/core/distributed/param_and_grad_buffer.py"
_DDP = "megatron/core/distributed/distributed_data_parallel.py"
_GROUPS = "megatron/core/parallel_state.py"
_RERUN = "megatron/core/rerun_state_machine.py"
_SHARDED = "megatron/core/optimizer/distrib_optimizer.py"
_OPTIMIZER = "megatron/core/optimizer/optimizer.py"
_BATCHES = "megatron/core/num_microbatches_calculator.py"
_MTP = "megatron/core/transformer/multi_token_prediction.py"
_MOE_LOGGING = "megatron/core/transformer/moe/moe_logging.py"
_TRAINING = "megatron/training/training.py"
_GLOBALS = "megatron/training/global_vars.py"
_CHECKPOINTING = "megatron/training/checkpointing.py"
_STRATEGIES = "megatron/core/dist_checkpointing/strategies"
_ASYNC = f"{_STRATEGIES}/async_utils.py"
_READER = f"{_STRATEGIES}/cached_metadata_filesystem_reader.py"


@dataclass(frozen=True)
class Name:
    """A function, a class, its method or attribute, or a variable of a file of Megatron-LM.

    ``parameters``: those of a function that are used by name or position. ``versions``: those in
    which this is as it was read.
    """

    file: str
    name: str
    parameters: tuple[str, ...] = ()
    versions: tuple[str, ...] = VERSIONS


NAMES: tuple[Name, ...] = (
    *(
        Name(
            point.module.replace(".", "/") + ".py",
            point.function,
            point.parameters,
            tuple(version for version in VERSIONS if point in points_of(version)),
        )
        for point in POINTS
    ),
    # Passes through pretrain().
    Name(_TRAINING, "destroy_global_state"),
    Name(_TRAINING, "build_pretraining_data_loader"),
    Name(_TRAINING, "should_disable_forward_pre_hook", ("args",)),
    Name(
        _TRAINING,
        "save_checkpoint_and_time",
        (
            "iteration",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "num_floating_point_operations_so_far",
            "checkpointing_context",
            "train_data_iterator",
        ),
    ),
    Name(_TRAINING, "get_model"),
    Name(
        "megatron/training/arguments.py",
        "core_transformer_config_from_args",
        ("args",),
        versions=_UP_TO_0_17,
    ),
    Name("megatron/training/arguments.py", "core_transformer_config_from_args"),
    Name(
        "megatron/training/argument_utils.py",
        "core_transformer_config_from_args",
        ("args",),
        _SINCE_0_18,
    ),
    Name("megatron/training/config/container.py", "PretrainConfigContainer", versions=_SINCE_0_18),
    Name(_TRAINING, "append_to_progress_log"),
    Name(
        "megatron/training/initialize.py",
        "_initialize_distributed",
        ("get_embedding_ranks", "get_position_embedding_ranks", "store"),
    ),
    Name(_GLOBALS, "unset_global_variables"),
    Name(_GLOBALS, "set_global_variables", ("args",)),
    Name(_GLOBALS, "set_args", ("args",)),
    Name(_GLOBALS, "get_timers"),
    Name(_GLOBALS, "_set_tensorboard_writer", ("args",)),
    Name(_GLOBALS, "_set_wandb_writer", ("args",)),
    Name(_GLOBALS, "_GLOBAL_TENSORBOARD_WRITER"),
    Name(_GLOBALS, "_GLOBAL_WANDB_WRITER"),
    Name("megatron/training/initialize.py", "set_global_variables", versions=_UP_TO_0_17),
    Name("megatron/training/arguments.py", "set_global_variables", versions=_SINCE_0_18),
    Name("megatron/training/async_utils.py", "_async_calls_queue"),
    Name("megatron/training/async_utils.py", "is_empty_async_queue"),
    Name(_CHECKPOINTING, "get_checkpoint_name"),
    Name(_CHECKPOINTING, "unwrap_model"),
    Name(
        _CHECKPOINTING,
        "generate_state_dict",
        (
            "args",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "rng_state",
            "iteration",
            "optim_sd_kwargs",
            "model_sd_kwargs",
            "rerun_state",
        ),
    ),
    Name(_CHECKPOINTING, "get_rng_state", ("ckpt_format", "tp_group", "pp_group")),
    Name(_CHECKPOINTING, "_build_sharded_state_dict_metadata", ("args",)),
    Name(_CHECKPOINTING, "_clean_metadata_for_serialization"),
    # Where errors of the file system are passed over.
    Name(_CHECKPOINTING, "_NON_PERSISTENT_CKPT_SUBDIR"),
    Name(_CHECKPOINTING, "cleanup_old_non_persistent_checkpoint"),
    Name(_CHECKPOINTING, "open_file", versions=_UP_TO_0_18),
    Name(_CHECKPOINTING, "maybe_msc", versions=_SINCE_0_19),
    Name(
        _TRAINING,
        "setup_model_and_optimizer",
        ("cfg_container", "model_provider_func"),
        _SINCE_0_19,
    ),
    Name(_CHECKPOINTING, "print_rank_0"),
    Name("megatron/training/utils.py", "open_file", versions=_UP_TO_0_17),
    Name("megatron/training/utils/log_utils.py", "append_to_progress_log", versions=_SINCE_0_18),
    Name("megatron/core/dist_checkpointing/serialization.py", "save_config"),
    Name(f"{_STRATEGIES}/torch.py", "save_state_dict_async_finalize", versions=("0.16",)),
    Name(f"{_STRATEGIES}/common.py", "TorchCommonSaveStrategy.save_common", versions=("0.16",)),
    Name(f"{_STRATEGIES}/state_dict_saver.py", "save_state_dict_async_finalize"),
    Name(
        "megatron/core/dist_checkpointing/serialization.py",
        "save_common",
        versions=("0.17", "0.18"),
    ),
    Name(f"{_STRATEGIES}/filesystem_async.py", "FileSystemWriterAsync.finish"),
    Name(_READER, "CachedMetadataFileSystemReader.clear_metadata_cache", versions=_SINCE_0_17),
    Name(_ASYNC, "AsyncCallsQueue.async_calls"),
    Name(_ASYNC, "AsyncCallsQueue.persistent"),
    Name(f"{_STRATEGIES}/filesystem_async.py", "_results_queue"),
    # A role of the same stage class.
    Name(
        "megatron/core/transformer/transformer_block.py",
        "get_num_layers_to_build",
        ("config", "vp_stage", "pp_rank"),
    ),
    Name(
        "megatron/core/transformer/transformer_layer.py",
        "get_transformer_layer_offset",
        ("config", "vp_stage", "pp_rank"),
    ),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.intra_distributed_optimizer_instance_group"),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.intra_distributed_optimizer_instance_rank"),
    # Counters.
    Name(_BATCHES, "get_num_microbatches"),
    Name(_BATCHES, "get_current_global_batch_size"),
    Name(_BATCHES, "get_current_running_global_batch_size"),
    Name(_BATCHES, "update_num_microbatches", ("consumed_samples", "consistency_check")),
    Name(
        "megatron/core/optimizer_param_scheduler.py",
        "get_canonical_lr_for_logging",
        ("param_groups",),
    ),
    Name(
        "megatron/core/optimizer_param_scheduler.py",
        "OptimizerParamScheduler.num_steps",
    ),
    Name(
        "megatron/core/optimizer_param_scheduler.py",
        "OptimizerParamScheduler.use_checkpoint_opt_param_scheduler",
    ),
    Name(
        "megatron/core/datasets/gpt_dataset.py", "GPTDataset.masks_and_position_ids_are_cacheable"
    ),
    Name("megatron/core/datasets/gpt_dataset.py", "GPTDataset.cached_loss_mask"),
    # What an interrupted step leaves behind.
    Name(_RERUN, "_GLOBAL_RERUN_STATE_MACHINE"),
    Name(_RERUN, "get_rerun_state_machine"),
    Name(_RERUN, "destroy_rerun_state_machine"),
    Name(_RERUN, "RerunState.NOT_RUNNING_YET"),
    Name(_RERUN, "RerunState.INITIAL_RUN"),
    Name(_RERUN, "RerunStateMachine.state"),
    Name(_RERUN, "RerunStateMachine.first_iteration_complete"),
    Name(_RERUN, "RerunStateMachine.rerun_requested"),
    Name(_RERUN, "RerunStateMachine.state_dict", ("data_iterator", "ckpt_format")),
    Name(_RERUN, "RerunStateMachine.current_iteration"),
    Name(_RERUN, "RerunStateMachine.get_mode"),
    Name(_RERUN, "RerunStateMachine.set_mode", ("mode",)),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.grad_reduce_handle"),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.grad_reduce_finished", versions=_SINCE_0_18),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.param_gather_handle"),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.param_gather_dispatched"),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.per_param_grad_ready_counts"),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.golden_per_param_grad_ready_counts"),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.is_first_batch"),
    Name(_BUCKETS, "_ParamAndGradBucketGroup.is_last_microbatch"),
    Name(_DDP, "DistributedDataParallel.bucket_groups"),
    Name(_DDP, "DistributedDataParallel.expert_parallel_bucket_groups"),
    Name(_DDP, "DistributedDataParallel.remove_forward_pre_hook_handles"),
    Name(_DDP, "DistributedDataParallel.force_all_reduce"),
    Name(_DDP, "DistributedDataParallel.enable_forward_pre_hook"),
    Name(_DDP, "DistributedDataParallel.zero_grad_buffer"),
    Name(_DDP, "DistributedDataParallel.start_param_sync", ("force_sync",)),
    Name(
        "megatron/core/extensions/transformer_engine.py",
        "TEDotProductAttention.current_max_attn_logits",
    ),
    Name("megatron/core/timers.py", "Timers._timers"),
    Name("megatron/core/timers.py", "Timer._started"),
    Name("megatron/core/timers.py", "Timer.reset"),
    # State of the optimizer.
    Name(_OPTIMIZER, "ChainedOptimizer.chained_optimizers"),
    Name(_OPTIMIZER, "MegatronOptimizer.init_state_fn"),
    Name(_OPTIMIZER, "MegatronOptimizer._has_grad_norm_group_cache", versions=_SINCE_0_19),
    Name(_SHARDED, "DistributedOptimizer.is_stub_optimizer"),
    Name(_OPTIMIZER, "MegatronOptimizer.get_grad_stats_parallel_group"),
    Name(_OPTIMIZER, "MixedPrecisionOptimizer.grad_scaler"),
    Name(_SHARDED, "DistributedOptimizer._copy_main_params_to_model_params"),
    Name(_SHARDED, "DistributedOptimizer.per_model_bucket_groups"),
    Name(_SHARDED, "DistributedOptimizer.ddp_config"),
    # Other state, and the groups.
    Name(_MTP, "MTPLossLoggingHelper.tracker"),
    Name(
        "megatron/core/transformer/moe/moe_utils.py",
        "get_moe_layer_wise_logging_tracker",
        versions=_UP_TO_0_17,
    ),
    Name(_MOE_LOGGING, "get_moe_metrics_tracker", versions=_SINCE_0_18),
    Name(_MOE_LOGGING, "MoEMetricsTracker.metrics", versions=_SINCE_0_18),
    Name(_MOE_LOGGING, "MetricEntry.values", versions=_SINCE_0_18),
    Name("megatron/core/tensor_parallel/random.py", "get_cuda_rng_tracker"),
    Name("megatron/core/tensor_parallel/random.py", "CudaRNGStatesTracker.get_states"),
    Name("megatron/core/tensor_parallel/random.py", "CudaRNGStatesTracker.set_states", ("states",)),
    Name("megatron/core/utils.py", "get_attr_wrapped_model", ("model", "attr")),
    Name("megatron/core/utils.py", "get_model_config", ("model",)),
    Name(_GROUPS, "destroy_model_parallel"),
    Name(_GROUPS, "get_global_memory_buffer"),
    Name(_GROUPS, "get_data_parallel_group", ("with_context_parallel",)),
    Name(_GROUPS, "get_expert_data_parallel_group"),
    Name(_GROUPS, "get_inter_distributed_optimizer_instance_group"),
    Name(_GROUPS, "is_pipeline_last_stage", ("ignore_virtual",)),
    Name(_GROUPS, "is_rank_in_embedding_group"),
    Name(_GROUPS, "set_virtual_pipeline_model_parallel_rank", ("rank",)),
)


def expected_in(version: str) -> tuple[Name, ...]:
    """Returns what a version has to have; one that nobody tried, what the newest has."""
    family = next((each for each in VERSIONS if version.startswith(f"{each}.")), VERSIONS[-1])
    return tuple(name for name in NAMES if family in name.versions)


def lacking(tree: Path, version: str) -> tuple[str, ...]:
    """Returns what the source in ``tree`` lacks, in words."""
    sources: dict[str, ast.Module] = {}
    return tuple(filter(None, (_complaint(tree, name, sources) for name in expected_in(version))))


def _complaint(tree: Path, name: Name, sources: dict[str, ast.Module]) -> str:
    file = tree / name.file
    if name.file not in sources:
        sources[name.file] = ast.parse(file.read_text() if file.is_file() else "")
    found = find(sources[name.file], name.name)
    if found is None:
        return f"{name.name} in {name.file}"
    if not name.parameters:
        return ""
    has = _parameters(found)
    missing = [parameter for parameter in name.parameters if parameter not in has]
    return f"{', '.join(missing)} of {name.name}() in {name.file}" if missing else ""


def find(scope: ast.AST, name: str) -> ast.AST | None:
    """Returns what defines ``name``, parts of which are joined by dots."""
    for part in name.split("."):
        found = dict(_definitions(scope)).get(part)
        if found is None:
            return None
        scope = found
    return scope


def _definitions(scope: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Everything a module or class defines, also under an ``if`` or ``try``; of a class also what
    its methods set on ``self``.
    """
    for node in _statements(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
            if isinstance(scope, ast.ClassDef):
                yield from _attributes(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name), node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)


def _attributes(method: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr, node


def _parameters(function: ast.AST) -> list[str]:
    if not isinstance(function, ast.FunctionDef):
        return []
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
