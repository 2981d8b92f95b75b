"""What the hooks rely on in Megatron-LM, by name, compared with its source.

A new version fails here first. Nothing of Megatron is imported: the source is read.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest

from deadpool_megatron.hookpoints import POINTS, Point
from tests.megatron_lm.harness.checkout import checkout, needs_megatron_lm

pytestmark = [pytest.mark.megatron_lm, needs_megatron_lm]

_BUCKETS = "megatron/core/distributed/param_and_grad_buffer.py"
_DDP = "megatron/core/distributed/distributed_data_parallel.py"
_GROUPS = "megatron/core/parallel_state.py"
_RERUN = "megatron/core/rerun_state_machine.py"
_SHARDED = "megatron/core/optimizer/distrib_optimizer.py"
_OPTIMIZER = "megatron/core/optimizer/optimizer.py"
_BATCHES = "megatron/core/num_microbatches_calculator.py"
_MTP = "megatron/core/transformer/multi_token_prediction.py"
_TRAINING = "megatron/training/training.py"
_GLOBALS = "megatron/training/global_vars.py"
_CHECKPOINTING = "megatron/training/checkpointing.py"
_STRATEGIES = "megatron/core/dist_checkpointing/strategies"
_ASYNC = f"{_STRATEGIES}/async_utils.py"

#: file, name (functions, classes, their methods and attributes, variables), and for a function the
#: parameters that are used by name or position
RELIED_ON: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # Passes through pretrain().
    (_TRAINING, "destroy_global_state", ()),
    (_TRAINING, "build_pretraining_data_loader", ()),
    (_TRAINING, "should_disable_forward_pre_hook", ("args",)),
    (
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
    (_TRAINING, "get_model", ()),
    ("megatron/training/arguments.py", "core_transformer_config_from_args", ("args",)),
    (
        "megatron/training/initialize.py",
        "_initialize_distributed",
        ("get_embedding_ranks", "get_position_embedding_ranks", "store"),
    ),
    (_GLOBALS, "unset_global_variables", ()),
    (_GLOBALS, "set_global_variables", ("args",)),
    (_GLOBALS, "set_args", ("args",)),
    (_GLOBALS, "get_timers", ()),
    (_GLOBALS, "_set_tensorboard_writer", ("args",)),
    (_GLOBALS, "_set_wandb_writer", ("args",)),
    (_GLOBALS, "_GLOBAL_TENSORBOARD_WRITER", ()),
    (_GLOBALS, "_GLOBAL_WANDB_WRITER", ()),
    ("megatron/training/initialize.py", "set_global_variables", ()),
    ("megatron/training/async_utils.py", "_async_calls_queue", ()),
    ("megatron/training/async_utils.py", "is_empty_async_queue", ()),
    (_CHECKPOINTING, "get_checkpoint_name", ()),
    # Where errors of the file system are passed over.
    (_CHECKPOINTING, "_NON_PERSISTENT_CKPT_SUBDIR", ()),
    (_CHECKPOINTING, "cleanup_old_non_persistent_checkpoint", ()),
    (_CHECKPOINTING, "open_file", ()),
    (_CHECKPOINTING, "print_rank_0", ()),
    ("megatron/training/utils.py", "open_file", ()),
    ("megatron/core/dist_checkpointing/serialization.py", "save_config", ()),
    (f"{_STRATEGIES}/torch.py", "save_state_dict_async_finalize", ()),
    (f"{_STRATEGIES}/common.py", "TorchCommonSaveStrategy.save_common", ()),
    (f"{_STRATEGIES}/filesystem_async.py", "FileSystemWriterAsync.finish", ()),
    (_ASYNC, "AsyncCallsQueue.async_calls", ()),
    (_ASYNC, "AsyncCallsQueue.persistent", ()),
    (f"{_STRATEGIES}/filesystem_async.py", "_results_queue", ()),
    # A role of the same stage class.
    (
        "megatron/core/transformer/transformer_block.py",
        "get_num_layers_to_build",
        ("config", "vp_stage", "pp_rank"),
    ),
    (
        "megatron/core/transformer/transformer_layer.py",
        "get_transformer_layer_offset",
        ("config", "vp_stage", "pp_rank"),
    ),
    (_BUCKETS, "_ParamAndGradBucketGroup.intra_distributed_optimizer_instance_group", ()),
    (_BUCKETS, "_ParamAndGradBucketGroup.intra_distributed_optimizer_instance_rank", ()),
    # Counters.
    (_BATCHES, "get_num_microbatches", ()),
    (_BATCHES, "get_current_global_batch_size", ()),
    (_BATCHES, "get_current_running_global_batch_size", ()),
    (_BATCHES, "update_num_microbatches", ("consumed_samples", "consistency_check")),
    (
        "megatron/core/optimizer_param_scheduler.py",
        "get_canonical_lr_for_logging",
        ("param_groups",),
    ),
    (
        "megatron/core/optimizer_param_scheduler.py",
        "OptimizerParamScheduler.num_steps",
        (),
    ),
    # What an interrupted step leaves behind.
    (_RERUN, "_GLOBAL_RERUN_STATE_MACHINE", ()),
    (_RERUN, "get_rerun_state_machine", ()),
    (_RERUN, "destroy_rerun_state_machine", ()),
    (_RERUN, "RerunState.NOT_RUNNING_YET", ()),
    (_RERUN, "RerunStateMachine.state", ()),
    (_RERUN, "RerunStateMachine.current_iteration", ()),
    (_RERUN, "RerunStateMachine.get_mode", ()),
    (_RERUN, "RerunStateMachine.set_mode", ("mode",)),
    (_BUCKETS, "_ParamAndGradBucketGroup.grad_reduce_handle", ()),
    (_BUCKETS, "_ParamAndGradBucketGroup.param_gather_handle", ()),
    (_BUCKETS, "_ParamAndGradBucketGroup.param_gather_dispatched", ()),
    (_BUCKETS, "_ParamAndGradBucketGroup.per_param_grad_ready_counts", ()),
    (_BUCKETS, "_ParamAndGradBucketGroup.golden_per_param_grad_ready_counts", ()),
    (_BUCKETS, "_ParamAndGradBucketGroup.is_first_batch", ()),
    (_BUCKETS, "_ParamAndGradBucketGroup.is_last_microbatch", ()),
    (_DDP, "DistributedDataParallel.bucket_groups", ()),
    (_DDP, "DistributedDataParallel.expert_parallel_bucket_groups", ()),
    (_DDP, "DistributedDataParallel.remove_forward_pre_hook_handles", ()),
    (_DDP, "DistributedDataParallel.force_all_reduce", ()),
    (_DDP, "DistributedDataParallel.enable_forward_pre_hook", ()),
    (_DDP, "DistributedDataParallel.zero_grad_buffer", ()),
    (_DDP, "DistributedDataParallel.start_param_sync", ("force_sync",)),
    (
        "megatron/core/extensions/transformer_engine.py",
        "TEDotProductAttention.current_max_attn_logits",
        (),
    ),
    ("megatron/core/timers.py", "Timers._timers", ()),
    ("megatron/core/timers.py", "Timer._started", ()),
    ("megatron/core/timers.py", "Timer.reset", ()),
    # State of the optimizer.
    (_OPTIMIZER, "ChainedOptimizer.chained_optimizers", ()),
    (_OPTIMIZER, "MegatronOptimizer.init_state_fn", ()),
    (_SHARDED, "DistributedOptimizer.is_stub_optimizer", ()),
    (_OPTIMIZER, "MegatronOptimizer.get_grad_stats_parallel_group", ()),
    (_OPTIMIZER, "MixedPrecisionOptimizer.grad_scaler", ()),
    (_SHARDED, "DistributedOptimizer._copy_main_params_to_model_params", ()),
    (_SHARDED, "DistributedOptimizer.per_model_bucket_groups", ()),
    (_SHARDED, "DistributedOptimizer.ddp_config", ()),
    # Other state, and the groups.
    (_MTP, "MTPLossLoggingHelper.tracker", ()),
    (
        "megatron/core/transformer/moe/moe_utils.py",
        "get_moe_layer_wise_logging_tracker",
        (),
    ),
    ("megatron/core/tensor_parallel/random.py", "get_cuda_rng_tracker", ()),
    ("megatron/core/tensor_parallel/random.py", "CudaRNGStatesTracker.get_states", ()),
    ("megatron/core/tensor_parallel/random.py", "CudaRNGStatesTracker.set_states", ("states",)),
    ("megatron/core/utils.py", "get_attr_wrapped_model", ("model", "attr")),
    ("megatron/core/utils.py", "get_model_config", ("model",)),
    (_GROUPS, "destroy_model_parallel", ()),
    (_GROUPS, "get_global_memory_buffer", ()),
    (_GROUPS, "get_data_parallel_group", ("with_context_parallel",)),
    (_GROUPS, "get_expert_data_parallel_group", ()),
    (_GROUPS, "get_inter_distributed_optimizer_instance_group", ()),
    (_GROUPS, "is_pipeline_last_stage", ("ignore_virtual",)),
    (_GROUPS, "is_rank_in_embedding_group", ()),
    (_GROUPS, "set_virtual_pipeline_model_parallel_rank", ("rank",)),
)

#: what train_step() answers, in this order
_ANSWER = (
    "loss_reduced",
    "skipped_iter",
    "should_checkpoint",
    "should_exit",
    "exit_code",
    "grad_norm",
    "num_zeros_in_grad",
    "log_max_attention_logit",
)


@functools.cache
def _source(file: str) -> ast.Module:
    tree = checkout()
    assert tree is not None
    return ast.parse((tree / file).read_text())


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


def _find(file: str, name: str) -> ast.AST | None:
    scope: ast.AST = _source(file)
    for part in name.split("."):
        found = dict(_definitions(scope)).get(part)
        if found is None:
            return None
        scope = found
    return scope


def _parameters(function: ast.AST | None) -> list[str]:
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.function)
def test_points_are_there(point: Point) -> None:
    function = _find(point.module.replace(".", "/") + ".py", point.function)
    assert function is not None, f"{point.module}.{point.function} is gone"
    assert set(point.parameters) <= set(_parameters(function))


@pytest.mark.parametrize(
    ("file", "name", "parameters"), RELIED_ON, ids=[name for _, name, _ in RELIED_ON]
)
def test_names_are_there(file: str, name: str, parameters: tuple[str, ...]) -> None:
    found = _find(file, name)
    assert found is not None, f"{name} is not in {file} any more"
    if parameters:
        assert set(parameters) <= set(_parameters(found))


def test_a_step_answers_in_the_known_order() -> None:
    step = _find(_TRAINING, "train_step")
    assert step is not None
    answers = [
        [ast.unparse(element) for element in node.value.elts]
        for node in ast.walk(step)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    ]
    # At an early end, with losses, and without.
    assert len(answers) == 3
    assert list(_ANSWER) in answers
    for answer in answers:
        assert len(answer) == len(_ANSWER)
        assert answer[3] == "should_exit"
