"""State of the bench's training kept by torch.distributed.checkpoint, as users do today.

Every rank names its own tensors, the model's by pipeline stage (data-parallel ranks hold the same,
the planner writes them once); the live tensors are written from and read into directly.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from deadpool_megatron.megatron import loop_extras
from deadpool_megatron.megatron.optimizer import inner_optimizers
from deadpool_megatron.state.extras import decode, encode
from deadpool_megatron.trainer.gpt_loop import TrainingLoop
from deadpool_megatron.trainer.megatron_api import parallel_state

# DCP writes this file last.
_COMPLETE = ".metadata"
# While a checkpoint is written there is another.
_KEPT = 2


class Keeper:
    """The interface of keepers; this class keeps nothing."""

    def restore(self, loop: TrainingLoop) -> None:
        """Load the newest kept state, if any, into ``loop``, just built. Collective."""

    def keep(self, loop: TrainingLoop) -> None:
        """Keep the state after the step that just ended. Collective."""

    def finish(self) -> None:
        """Wait for writes that are in progress. Collective."""


class CheckpointKeeper(Keeper):
    """A checkpoint after every ``every`` steps, with ``dcp.save`` or ``dcp.async_save``.

    With the latter the write of the previous checkpoint is awaited first: two at once would be
    accepted, but take twice the memory.
    """

    def __init__(self, folder: Path, every: int, asynchronous: bool) -> None:
        self._folder = folder
        self._every = every
        # Collectives of the writer must not meet those of training.
        self._group = dist.new_group(backend="gloo") if asynchronous else None
        self._under_way: Future[Any] | None = None

    def restore(self, loop: TrainingLoop) -> None:
        newest = [newest_complete(self._folder)]
        # All ranks load the checkpoint that rank 0 found.
        dist.broadcast_object_list(newest, src=0)
        if newest[0] is None:
            return
        self._load(loop, self._folder / newest[0])

    def _load(self, loop: TrainingLoop, directory: Path) -> None:
        state = state_of(loop)
        dcp.load(state, checkpoint_id=directory)
        put_back(loop, state)

    def _save(self, loop: TrainingLoop, directory: Path) -> None:
        dcp.save(state_of(loop), checkpoint_id=directory)

    def keep(self, loop: TrainingLoop) -> None:
        iteration = loop.counters["iteration"]
        if iteration % self._every:
            return
        directory = self._folder / f"step-{iteration:07d}"
        if self._group is None:
            self._save(loop, directory)
        else:
            self.finish()
            self._under_way = dcp.async_save(
                state_of(loop), checkpoint_id=directory, process_group=self._group
            )
        self._prune()

    def finish(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _prune(self) -> None:
        """Remove all but the newest complete checkpoints."""
        if dist.get_rank() == 0:
            for name in complete(self._folder)[:-_KEPT]:
                shutil.rmtree(self._folder / name)


class ReshardingKeeper(CheckpointKeeper):
    """Megatron's torch_dist checkpoint, which is DCP's, by names that any number of replicas
    loads."""

    def _load(self, loop: TrainingLoop, directory: Path) -> None:
        loop.load_checkpoint(directory)

    def _save(self, loop: TrainingLoop, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        loop.save_checkpoint(directory)


def complete(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints in ``folder``, oldest first."""
    return sorted(path.parent.name for path in folder.glob(f"step-*/{_COMPLETE}"))


def newest_complete(folder: Path) -> str | None:
    """Return the name of the newest complete checkpoint."""
    return next(reversed(complete(folder)), None)


def state_of(loop: TrainingLoop) -> dict[str, Any]:
    """Return everything that the training of this rank depends on, by name, with live tensors."""
    stage, rank = parallel_state.get_pipeline_model_parallel_rank(), dist.get_rank()
    state: dict[str, Any] = {}
    for number, chunk in enumerate(loop.model_chunks):
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            state[f"stage{stage}.model{number}.{name}"] = tensor.detach()
    for number, inner in enumerate(inner_optimizers(loop.optimizer)):
        parameters = [p for group in inner.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            place = f"rank{rank}.optimizer{number}.{index}"
            state[f"{place}.master"] = parameter.detach()
            for name, tensor in inner.optimizer.state[parameter].items():
                state[f"{place}.{name}"] = tensor
    # As bytes, so that nothing takes it apart.
    state[f"rank{rank}.extras"] = bytes(encode(loop_extras.capture(loop)))
    return state


def put_back(loop: TrainingLoop, state: dict[str, Any]) -> None:
    """Set ``loop`` to the state that was read; its tensors have it already."""
    values = decode(state[f"rank{dist.get_rank()}.extras"])
    loop_extras.restore(loop, values)
    loop.reset_after_interrupt()
    # Last: building anything before might draw from a generator.
    loop_extras.restore_last(values)
