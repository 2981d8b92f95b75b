"""The base classes of a training program on plain PyTorch: its loop, and the maker of the loop."""

from __future__ import annotations

import functools
import hashlib
import random
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.member.framework import Framework
from deadpool_megatron.member.loop import Emit, Program, ProtectedLoop, SteppedLoop
from deadpool_megatron.state.digest import state_digest
from deadpool_megatron.torch_native.framework import TorchFramework
from deadpool_megatron.torch_native.loop_state import LoopState, copy_by_name
from deadpool_megatron.torch_native.wrappers import forget_meshes


class TorchLoop(SteppedLoop):
    """A loop with a model and a torch optimizer.

    A subclass makes ``model`` (with DistributedDataParallel or FSDP2 in it), ``optimizer`` and, if
    it has them, ``scheduler`` (of ``torch.optim.lr_scheduler``) and ``grad_scaler``, and defines
    :meth:`iterate`. All roles begin with the random states of ``seed``. Checkpoints are written
    after the last of ``iterations`` and each ``save_interval``.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    grad_scaler: Any = None

    def __init__(self, emit: Emit, iterations: int, *, seed: int, save_interval: int = 0) -> None:
        self.emit, self.iterations, self.save_interval = emit, iterations, save_interval
        # All generators whose states are captured, so that two runs can be compared in full.
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.counters = {"iteration": 0}
        self.log_sums = {}

    @abstractmethod
    def iterate(self) -> Tensor:
        """Run forward, backward, ``optimizer.step()`` and ``scheduler.step()`` of the iteration
        after ``counters["iteration"]``; return this role's loss."""

    @functools.cached_property
    def state(self) -> LoopState:
        """The state of the loop by name."""
        return LoopState(self)

    @property
    def done(self) -> bool:
        """See :class:`SteppedLoop`."""
        return self.counters["iteration"] >= self.iterations

    def train_step(self) -> None:
        """See :class:`SteppedLoop`. Role 0 reports the mean of the losses."""
        loss = self.iterate().detach().clone()
        self.counters["iteration"] += 1
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            facts = {
                "iteration": self.counters["iteration"],
                "loss": (float(loss) / dist.get_world_size()).hex(),
                "grad_norm": None,
                "learning_rate": float(self.optimizer.param_groups[0]["lr"]).hex(),
                "skipped": False,
                "samples": self.counters.get("consumed_train_samples", 0),
            }
            self.emit("step", facts)

    def segments_after(self, iteration: int) -> tuple[str, ...]:
        """See :class:`SteppedLoop`."""
        is_due = self.save_interval and iteration % self.save_interval == 0
        return ("save",) if is_due or iteration == self.iterations else ()

    def run_segment(self, name: str) -> None:
        """See :class:`SteppedLoop`."""
        raise NotImplementedError(f"the loop has no {name}")

    def reset_after_interrupt(self) -> None:
        """See :class:`ProtectedLoop`: a loop whose data follow from ``counters`` needs no reset."""

    def save_checkpoint(self, directory: Path) -> None:
        """See :class:`SteppedLoop`: each role writes its own state."""
        state = {"tensors": self.state.tensors(), "values": self.state.values()}
        torch.save(state, _file_of_role(directory))

    def load_checkpoint(self, directory: Path) -> None:
        """See :class:`ProtectedLoop`. The checkpoint must be of a run with as many roles."""
        loaded = torch.load(_file_of_role(directory), weights_only=True)
        copy_by_name(self.state.tensors(), loaded["tensors"])
        self.state.restore_values(loaded["values"])

    def stage_class(self) -> str:
        """See :class:`ProtectedLoop`: a digest of names and shapes of all tensors."""
        shapes = repr(
            [(name, tuple(tensor.shape)) for name, tensor in self.state.tensors().items()]
        )
        return hashlib.sha256(shapes.encode()).hexdigest()[:16]

    def state_hash(self) -> str:
        """See :class:`ProtectedLoop`."""
        return state_digest([*self.state.tensors().items(), *self.state.digest_entries()])


class TorchProgram(Program):
    """A program whose loops are made by ``make``, with their groups other than WORLD, if any."""

    def __init__(self, make: Callable[[Emit], TorchLoop]) -> None:
        self._make = make

    def make_groups(self) -> None:
        """See :class:`Program`."""
        dist.init_process_group()

    def make_loop(self, emit: Emit) -> TorchLoop:
        """See :class:`Program`."""
        forget_meshes()
        return self._make(emit)

    def framework(self, loop: ProtectedLoop) -> Framework:
        """See :class:`Program`."""
        assert isinstance(loop, TorchLoop)
        return TorchFramework(loop)

    def drop_groups(self) -> None:
        """See :class:`Program`."""
        dist.destroy_process_group()


def _file_of_role(directory: Path) -> Path:
    return directory / f"role-{dist.get_rank()}.pt"
