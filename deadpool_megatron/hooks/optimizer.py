"""Megatron's optimizers: their state as parts, made complete at start, and where the gate goes.

``get_megatron_optimizer`` answers a ChainedOptimizer of inner optimizers (dense, expert, ...); each
inner one becomes one part, because the bytes of each are shared by another set of roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from deadpool_megatron.state.packing import Part, move_into_arenas


class UnsupportedOptimizer(ValueError):
    """An optimizer whose unique state is not known; the message says which and why."""


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Megatron's inner optimizers that hold state (stubs of ranks without parameters left out)."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]


def is_distributed(inner: Any) -> bool:
    """True for Megatron's DistributedOptimizer (state sharded over data-parallel peers)."""
    return isinstance(inner, DistributedOptimizer)


_UNKNOWN_CLASSES = frozenset(
    {"HybridDeviceOptimizer", "LayerWiseDistributedOptimizer", "TensorParallelMuon"}
)


def refuse_unknown_state(optimizer: Any, config: Any) -> None:
    """Raise UnsupportedOptimizer where state is known to lie outside of parts and extras.

    ``config`` is the model's. Restoring less than all would train on, with other numbers (A8).
    """
    for name in ("fp8", "fp4"):
        if getattr(config, name, None):
            raise UnsupportedOptimizer(f"{name}: scaling factors live outside of module buffers")
    inner = inner_optimizers(optimizer)
    classes = {type(one).__name__ for one in (optimizer, *inner, *(i.optimizer for i in inner))}
    if found := sorted(classes & _UNKNOWN_CLASSES):
        raise UnsupportedOptimizer(f"{found[0]} has no inventory of its state")
    if any(getattr(one.config, "use_precision_aware_optimizer", False) for one in inner):
        raise UnsupportedOptimizer(
            "the precision-aware optimizer keeps part of its state in the model's parameters"
        )


def complete_state(optimizer: Any) -> None:
    """Create the state that torch's Adam would create in its first step, as zeros.

    The layout of a slot must be fixed before the first step. A zero state gives the same first
    update as no state: it is what torch itself starts from.
    """
    for inner in inner_optimizers(optimizer):
        torch_optimizer = inner.optimizer
        if not isinstance(torch_optimizer, torch.optim.Adam | torch.optim.AdamW):
            if inner.init_state_fn is None:
                raise UnsupportedOptimizer(f"{type(torch_optimizer).__name__} has no known state")
            inner.init_state_fn(torch_optimizer, inner.config)
            continue
        for group in torch_optimizer.param_groups:
            if group.get("amsgrad"):
                raise UnsupportedOptimizer("amsgrad keeps a third moment; not supported")
            for parameter in group["params"]:
                state = torch_optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter.detach())
                    state["exp_avg_sq"] = torch.zeros_like(parameter.detach())


class ShardState:
    """The tensors of all inner optimizers, one part per inner optimizer, packed where possible.

    Packing re-points tensors that own their memory into flat arenas; :meth:`readopt` puts that
    back after a load of a checkpoint has put other tensors in their place.
    """

    def __init__(self, optimizer: Any) -> None:
        self._kept = [_Kept(*place) for place in _places(optimizer)]
        self.parts = [
            Part(
                f"shard{index}",
                move_into_arenas([kept.tensor for kept in self._kept if kept.inner is inner]),
                _replicas(inner),
            )
            for index, inner in enumerate(inner_optimizers(optimizer))
        ]
        for kept in self._kept:
            kept.settle()

    def readopt(self) -> None:
        """Move what a load has replaced back into the packed tensors. Values do not change."""
        with torch.no_grad():
            for kept in self._kept:
                kept.readopt()


@dataclass
class _Kept:
    """One tensor of an optimizer: a master weight (``key`` empty) or an entry of its state."""

    inner: Any
    parameter: Tensor
    key: str
    tensor: Tensor

    def settle(self) -> None:
        """Remember the memory the tensor has now, after packing."""
        self._place = self.tensor.detach()

    def readopt(self) -> None:
        """Bring the current value into the remembered memory."""
        state = self.inner.optimizer.state
        current = state[self.parameter][self.key] if self.key else self.parameter
        if current is self.tensor and current.data_ptr() == self._place.data_ptr():
            return
        self._place.copy_(current.detach())
        self.tensor.data = self._place
        if self.key:
            state[self.parameter][self.key] = self.tensor


def _places(optimizer: Any) -> Iterator[tuple[Any, Tensor, str, Tensor]]:
    """Master, then its state, in the order of the groups: equal in equal roles."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                yield inner, parameter, "", parameter
                state = inner.optimizer.state[parameter]
                for key in sorted(state):
                    if isinstance(state[key], Tensor):
                        yield inner, parameter, key, state[key]


def _replicas(inner: Any) -> list[int]:
    """Roles whose bytes of this inner optimizer are identical, the own role included."""
    own = dist.get_rank()
    if is_distributed(inner):
        if inner.ddp_config.num_distributed_optimizer_instances == 1:
            return [own]
        group = parallel_state.get_inter_distributed_optimizer_instance_group()
        return list(dist.get_process_group_ranks(group))
    expert = any(
        not getattr(parameter, "allreduce", True)
        for group in inner.optimizer.param_groups
        for parameter in group["params"]
    )
    group = (
        parallel_state.get_expert_data_parallel_group()
        if expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return list(dist.get_process_group_ranks(group))


def statistics_span_the_world(optimizer: Any) -> bool:
    """True when found-inf or the gradient norm is summed over all roles before any update.

    Then the host has waited for a word of every role between its gate and its first overwrite, and
    2+N slots suffice (design, section 4). Otherwise the dependency argument needs 3+N.
    """
    inner = inner_optimizers(optimizer)
    if not inner or not all(is_distributed(one) for one in inner):
        return dist.get_world_size() == 1
    groups = [one.get_grad_stats_parallel_group() for one in inner]
    return all(dist.get_world_size(group) == dist.get_world_size() for group in groups)


def param_group_values(optimizer: Any) -> list[list[dict[str, Any]]]:
    """The plain values of every parameter group (lr, weight decay, ...): what the scheduler set."""
    return [
        [
            {k: v for k, v in group.items() if isinstance(v, int | float | bool | str)}
            for group in inner.optimizer.param_groups
        ]
        for inner in inner_optimizers(optimizer)
    ]


def restore_param_group_values(optimizer: Any, values: list[list[dict[str, Any]]]) -> None:
    """Inverse of :func:`param_group_values`, in place."""
    for inner, groups in zip(inner_optimizers(optimizer), values, strict=True):
        for group, kept in zip(inner.optimizer.param_groups, groups, strict=True):
            group.update(kept)


class StepHooks:
    """Registers the gate, the copy fence and the start of the snapshot with an optimizer.

    ``gate`` runs at the entry of the outermost ``step``, before found-inf and gradient norm;
    ``fence`` before, and ``updated`` after the update of each inner optimizer, with its index.
    A torch step pre-hook would be too late for the gate (traps, A2).
    """

    def __init__(
        self,
        optimizer: Any,
        gate: Callable[[], None],
        fence: Callable[[], None],
        updated: Callable[[int], None],
    ) -> None:
        original = optimizer.step

        def gated_step() -> Any:
            gate()
            return original()

        optimizer.step = gated_step
        for index, inner in enumerate(inner_optimizers(optimizer)):
            inner.optimizer.register_step_pre_hook(lambda *_: fence())
            inner.optimizer.register_step_post_hook(lambda *_, index=index: updated(index))
