"""State of the bench's training kept by lm-resiliency: copies in the memory of a peer.

By its integration for Megatron, which hooks optimizer and schedule; its checkpointing only, the
detection of faulty devices is left off. Restarts are torchrun's, as the package wants them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lm_resiliency import InMemoryCkptConfig
from lm_resiliency.integrations.megatron import enable_megatron_resiliency

from deadpool_megatron.trainer.gpt_loop import TrainingLoop
from other_systems.keepers import Keeper
from other_systems.nodes import NODE_VARIABLE


class ReplicaKeeper(Keeper):
    """A copy on this rank and one on its neighbour after every ``every`` steps.

    Its construction loads the state of a previous process into ``loop``. Collective. The package
    agrees on a step within a data-parallel group only; for all pipeline stages its own rendezvous
    chooses the step. This class does so instead, as it runs without.
    """

    def __init__(self, loop: TrainingLoop, folder: Path, every: int) -> None:
        self._loop = loop
        self._handle = enable_megatron_resiliency(
            model=loop.model_chunks,
            optimizer=loop.optimizer,
            opt_param_scheduler=loop.scheduler,
            interval=every,
            enable_detection=False,
            ckpt_config=InMemoryCkptConfig(
                replication_jump=1,
                disk_flush_interval=0,
                # A spare finds nothing of the node that was lost.
                disk_folder=str(folder / os.environ.get(NODE_VARIABLE, "")),
                verify_integrity=True,
                pin_memory=False,
            ),
            device=torch.device("cpu"),
            extra_state_fn=self._extra,
            load_extra_state_fn=self._put_back,
        )
        step = torch.tensor(self._handle.step_count)
        torch.distributed.all_reduce(step, torch.distributed.ReduceOp.MIN)
        is_ahead = step < self._handle.step_count
        if is_ahead and (step == 0 or self._handle.try_recover(step=int(step)) < 0):
            raise RuntimeError(f"this stage does not have step {step}, the newest of another stage")

    def finish(self) -> None:
        self._handle.close()

    def _extra(self) -> dict[str, Any]:
        """Return the state that the package does not know. Called before the step is counted."""
        counters = dict(self._loop.counters)
        counters["iteration"] += 1
        counters["consumed_train_samples"] += self._loop.config.global_batch_size
        return {"counters": counters, "scheduler": self._loop.scheduler.state_dict()}

    def _put_back(self, extra: dict[str, Any]) -> None:
        self._loop.counters.update(extra["counters"])
        # The schedule adds the loaded number of steps to its own.
        self._loop.scheduler.num_steps = 0
        self._loop.scheduler.load_state_dict(extra["scheduler"])
        self._loop.reset_after_interrupt()
