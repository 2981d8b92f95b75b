"""What Megatron-LM's save_checkpoint() writes, with marks for what an iteration changes.

The functions are Megatron's own; only those that would communicate are left out. No iteration of a
generation is to be run again: of the rerun machine Megatron writes nothing then, or since 0.18 the
state of a machine that has nothing to do.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core import parallel_state

from deadpool_megatron.persist.filling import Attributes, FromExtras, RandomStates
from deadpool_megatron.persist.skeleton import SkeletonError

# Of Megatron's arguments, which are part of a checkpoint: counted by every iteration.
_COUNTED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def saved_state(objects: tuple[Any, ...]) -> dict[str, Any]:
    """See :meth:`ProtectedLoop.checkpoint_state`; ``objects``: model chunks, optimizer, scheduler.

    Raises SkeletonError for arguments with which a save communicates, or is of another format.
    """
    from megatron.training import checkpointing, get_args

    args = get_args()
    _refuse(args)
    model, optimizer, scheduler = objects
    metadata = checkpointing._build_sharded_state_dict_metadata(args)
    random_states = checkpointing.get_rng_state(
        args.ckpt_format,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    random_states.data = [RandomStates()]
    state: dict[str, Any] = checkpointing.generate_state_dict(
        args,
        checkpointing.unwrap_model(model),
        optimizer,
        scheduler,
        random_states,
        iteration=0,
        optim_sd_kwargs={"metadata": metadata},
        model_sd_kwargs={"metadata": metadata},
        rerun_state=_idle_machine(args),
    )
    state["args"] = _arguments(args)
    state["iteration"] = FromExtras(("counters", "iteration"))
    state["num_floating_point_operations_so_far"] = FromExtras(("extra_state", "operations"))
    if "opt_param_scheduler" in state:
        marks = {name: FromExtras(("schedule", name)) for name in state["opt_param_scheduler"]}
        state["opt_param_scheduler"] = marks
    state["content_metadata"] = checkpointing._clean_metadata_for_serialization(metadata)
    return state


def _idle_machine(args: Any) -> dict[str, Any] | None:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    state: dict[str, Any] | None = get_rerun_state_machine().state_dict(None, args.ckpt_format)
    if state is not None:
        state["current_iteration"] = FromExtras(("counters", "iteration"))
    return state


def _arguments(args: Any) -> Attributes:
    """Megatron's arguments as they are once train() is under way."""
    from megatron.training import training

    later = copy.copy(args)
    # It completes the arguments with what they imply, in the first iteration.
    training.num_floating_point_operations(later, 1)
    later.num_floating_point_operations_so_far = float(args.num_floating_point_operations_so_far)
    counted = {name: FromExtras(("counters", name)) for name in _COUNTED}
    # train() sets it before it counts the iteration.
    current = FromExtras(("counters", "iteration"), plus=-1)
    return Attributes(later, {**counted, "curr_iteration": current})


def _refuse(args: Any) -> None:
    if args.ckpt_format != "torch_dist":
        raise SkeletonError(f"--ckpt-format {args.ckpt_format} cannot be exported, torch_dist can")
    if args.data_parallel_random_init:
        raise SkeletonError("--data-parallel-random-init: random states would have to be gathered")
