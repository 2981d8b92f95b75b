"""State of the bench's training kept by nvidia-resiliency-ext's local checkpoints.

Each rank's state lies in the memory of its own node (a file in /dev/shm) and in that of another
rank's, by the package's manager and its clique replication; a restarted rank without its file gets
it from there. Changed for gloo: the package sends and keeps tensors of CUDA devices only, and its
asynchronous save waits for such a device, so a save is synchronous.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local import basic_state_dict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)

from deadpool_megatron.trainer.gpt_loop import TrainingLoop
from other_systems.keepers import Keeper, put_back, state_of
from other_systems.nodes import NODE_VARIABLE


class HostState(basic_state_dict.BasicTensorAwareStateDict):
    """A state whose tensors are those of a host."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict, self._is_hollow = state, False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Leave them where they are."""


class HostGroup(GroupWrapper):
    """Sends and receives tensors of hosts."""

    def isend_state_dict(self, state: HostState, dst: int) -> dict[str, float]:
        """Send a state."""
        tensors = state.pop_tensors()
        self.send_object(state, dst)
        for tensor in tensors:
            dist.send(tensor, dst, group=self.group)
        return {"data_sent": 0.0}

    def irecv_state_dict(self, src: int) -> tuple[HostState, dict[str, float]]:
        """Receive a state."""
        state = self.recv_object(src)
        state.init_tensors()
        for tensor in state.tensors:
            dist.recv(tensor, src, group=self.group)
        return state, {"data_recv": 0.0}


class LocalKeeper(Keeper):
    """Local checkpoints after every ``every`` steps, on two ranks each."""

    def __init__(self, folder: Path, every: int) -> None:
        strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
        strategy.local_group = HostGroup(strategy.local_group.group)
        # A spare finds nothing of the node that was lost.
        place = Path("/dev/shm") / folder.parent.name / os.environ.get(NODE_VARIABLE, "")
        self._manager = LocalCheckpointManager(place, repl_strategy=strategy)
        self._every = every

    def restore(self, loop: TrainingLoop) -> None:
        if self._manager.find_latest() >= 0:
            state, kept = state_of(loop), self._manager.load()[0].state_dict
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.copy_(kept[name])
            put_back(loop, kept)

    def keep(self, loop: TrainingLoop) -> None:
        if (iteration := loop.counters["iteration"]) % self._every == 0:
            self._manager.save(HostState(state_of(loop)), iteration)
