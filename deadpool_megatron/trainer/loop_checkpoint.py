"""Writes a loop's whole state as a torch_dist checkpoint, and restores it exactly.

The format is Megatron's own. The extras are in separate files, and ``exact_load`` restores exactly
the values that Megatron's load changes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deadpool_megatron.file_systems import write_text
from deadpool_megatron.megatron import loop_extras
from deadpool_megatron.megatron.exact_load import exact_load
from deadpool_megatron.planning.model_replicas import Workload
from deadpool_megatron.state import extras
from deadpool_megatron.trainer import megatron_api as mcore
from deadpool_megatron.trainer.config import BadArgumentsError
from deadpool_megatron.trainer.megatron_api import parallel_state
from deadpool_megatron.vault.disk import extras_file

if TYPE_CHECKING:
    from deadpool_megatron.trainer.gpt_loop import TrainingLoop

# Megatron's file with the iteration of the newest complete checkpoint in a folder.
_TRACKER = "latest_checkpointed_iteration.txt"


def write(loop: TrainingLoop, directory: Path) -> None:
    """Write the state of ``loop`` into ``directory``, which is created if it is missing.
    Collective."""
    directory.mkdir(parents=True, exist_ok=True)
    loop.synchronize_parameters()
    # Write in the calling process; see :mod:`deadpool_megatron.megatron.in_process_writer`.
    writer = mcore.TorchDistSaveShardedStrategy("torch_dist", 1)
    mcore.dist_checkpointing.save(sharded_state(loop), str(directory), writer)
    encoded = extras.encode(loop_extras.capture(loop))
    extras_file.write(directory, dist.get_rank(), dist.get_world_size(), encoded)
    dist.barrier()  # no rank returns before all have written


def read(loop: TrainingLoop, directory: Path) -> None:
    """Load the state in ``directory`` into the live objects of ``loop``, in place. Collective.

    The tensors of the optimizer's state stay the same objects, so that references to them see the
    loaded values. The checkpoint may be of another number of ranks. Raises BadArgumentsError.
    """
    with exact_load(loop.optimizer, loop.scheduler):
        loaded = mcore.dist_checkpointing.load(sharded_state(loop, is_loading=True), str(directory))
        for index, module in enumerate(loop.models):
            module.load_state_dict(loaded[_model_key(loop, index)])
        loop.optimizer.load_state_dict(loaded["optimizer"])
    values = _extras_of(loop, directory)
    loop_extras.restore(loop, values)
    loop.reset_after_interrupt()
    # Restore random states last, as the steps before might draw from a generator.
    loop_extras.restore_last(values)


def _extras_of(loop: TrainingLoop, directory: Path) -> dict[str, Any]:
    """Return the extras of this rank. From a checkpoint of another number of ranks, return those of
    the rank with the same layers, slices and experts, and the lowest data-parallel rank: such ranks
    draw the same random numbers and have the same sums. Raises BadArgumentsError."""
    rank, world_size, grid = dist.get_rank(), dist.get_world_size(), Workload.of(loop.config).grid
    ranks = extras_file.role_count(directory) or world_size
    if ranks != world_size:
        rank = grid.donor(rank, world_size // grid.ranks, ranks // grid.ranks)
    encoded = extras_file.read(directory, rank, ranks)
    if encoded is None:
        raise BadArgumentsError(f"{directory} has no extras: another program has written it")
    return extras.decode(encoded)


def checkpoint_directory(folder: Path, iteration: int) -> Path:
    """Return the directory in which Megatron keeps the checkpoint of an iteration."""
    return folder / f"iter_{iteration:07d}"


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None."""
    tracker = folder / _TRACKER
    if not tracker.is_file():
        return None
    directory = checkpoint_directory(folder, int(tracker.read_text()))
    return directory if directory.is_dir() else None


def write_and_publish(loop: TrainingLoop, folder: Path) -> None:
    """Write a checkpoint of the current iteration and make it the newest. Collective.

    The call can be repeated: the checkpoint gets its final name only once it is complete, and an
    interrupted attempt leaves a folder that the next attempt replaces.
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


def sharded_state(loop: TrainingLoop, *, is_loading: bool = False) -> dict[str, Any]:
    """Return the state of a checkpoint; see :meth:`MegatronLoop.checkpoint_state`."""
    metadata = {
        # Shards are written without a gather, and can be loaded at any data-parallel size.
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {
        _model_key(loop, index): module.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for index, module in enumerate(loop.models)
    }
    return {
        **models,
        "optimizer": loop.optimizer.sharded_state_dict(
            dict(models), is_loading=is_loading, metadata=metadata
        ),
        "checkpoint_version": 3.0,
    }


def _model_key(loop: TrainingLoop, index: int) -> str:
    return "model" if len(loop.models) == 1 else f"model{index}"
