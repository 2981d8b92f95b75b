"""Writes and reads a loop's whole state as a torch_dist checkpoint, exactly.

The format is Megatron's own. What Megatron's code does not bring back exactly is put right here;
each such place says what would go wrong.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from deadpool_megatron.file_systems import write_text
from deadpool_megatron.hooks.capture.megatron_extras import random_states
from deadpool_megatron.hooks.checkpoints.loading import exact_load
from deadpool_megatron.persist.state_template import FromExtras, HexFloats, Joined, RandomStates
from deadpool_megatron.trainer.megatron_api import (
    ShardedObject,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
    get_cuda_rng_tracker,
    parallel_state,
)

if TYPE_CHECKING:
    from deadpool_megatron.trainer.training import TrainingLoop

# Megatron's name of the file that names the newest complete checkpoint of a folder.
_TRACKER = "latest_checkpointed_iteration.txt"


def write(loop: TrainingLoop, directory: Path) -> None:
    """Write the state of ``loop`` into ``directory``, created if missing. Collective."""
    directory.mkdir(parents=True, exist_ok=True)
    loop.synchronize_parameters()
    # In the calling process; see :mod:`deadpool_megatron.platform.saving`.
    writer = TorchDistSaveShardedStrategy("torch_dist", 1)
    dist_checkpointing.save(_sharded_state(loop, is_loading=False), str(directory), writer)


def read(loop: TrainingLoop, directory: Path) -> None:
    """Bring the state in ``directory`` into the live objects of ``loop``, in place. Collective.

    Optimizer state keeps its tensors: whoever holds references to them sees the loaded values.
    """
    with exact_load(loop.optimizer):
        loaded = dist_checkpointing.load(_sharded_state(loop, is_loading=True), str(directory))
        for index, module in enumerate(loop.models):
            module.load_state_dict(loaded[_model_key(loop, index)])
        loop.optimizer.load_state_dict(loaded["optimizer"])
    # The schedule adds the loaded number of steps to the one it has.
    loop.scheduler.num_steps = 0
    loop.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    loop.counters.update(loaded["counters"])
    own = loaded["rng_state"]
    loop.log_sums.update(own["log_sums"])
    loop.reset_after_interrupt()
    # Last: building anything before might draw from a generator.
    _set_generators(own)


def checkpoint_directory(folder: Path, iteration: int) -> Path:
    """Return where Megatron keeps the checkpoint of an iteration."""
    return folder / f"iter_{iteration:07d}"


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, or None when there is none."""
    tracker = folder / _TRACKER
    if not tracker.is_file():
        return None
    directory = checkpoint_directory(folder, int(tracker.read_text()))
    return directory if directory.is_dir() else None


def write_and_publish(loop: TrainingLoop, folder: Path) -> None:
    """Write a checkpoint of the current iteration and make it the newest. Collective, repeatable.

    It appears under its final name only when complete; an attempt that was cut short leaves a
    folder that the next attempt replaces.
    """
    final = checkpoint_directory(folder, loop.counters["iteration"])
    partial = final.with_name(f"{final.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    write(loop, partial)
    if dist.get_rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        write_text(folder / _TRACKER, str(loop.counters["iteration"]))
    dist.barrier()


def saved_state(loop: TrainingLoop) -> dict[str, Any]:
    """Return what :func:`write` writes, with marks for what an iteration changes; see
    :meth:`ProtectedLoop.checkpoint_state`."""
    state = _sharded_state(loop, is_loading=False)
    state["opt_param_scheduler"]["num_steps"] = FromExtras(("scheduler.num_steps",))
    state["counters"] = FromExtras(("counters",))
    state["rng_state"].data = Joined((RandomStates(), {"log_sums": HexFloats("log_sums")}))
    return state


def _sharded_state(loop: TrainingLoop, is_loading: bool) -> dict[str, Any]:
    metadata = {
        # Shards go to disk as they lie in the optimizer: no gathering, any data-parallel size.
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    # As Megatron's checkpoints name them; none of them is read from a part.
    states = RandomStates().value(random_states(), lambda *_: torch.empty(0))
    models = {
        _model_key(loop, index): module.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for index, module in enumerate(loop.models)
    }
    return {
        **models,
        "optimizer": loop.optimizer.sharded_state_dict(
            dict(models), is_loading=is_loading, metadata=metadata
        ),
        "opt_param_scheduler": loop.scheduler.state_dict(),
        "counters": dict(loop.counters),
        "checkpoint_version": 3.0,
        "rng_state": _own_object({**states, "log_sums": dict(loop.log_sums)}),
    }


def _model_key(loop: TrainingLoop, index: int) -> str:
    return "model" if len(loop.models) == 1 else f"model{index}"


def _own_object(data: dict[str, Any]) -> Any:
    """Data that differs on every rank, named by the rank's coordinates."""
    return ShardedObject(
        "rng_state",
        data,
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_data_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        ),
    )


def _set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
