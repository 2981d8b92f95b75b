"""DistributedDataParallel and FSDP2 in a model: replicas, and remains of an interrupted step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel

from deadpool_megatron.state.optimizer_state import UnsupportedState

# Attributes of FSDP's groups of parameters, which a loop sets for each micro-batch.
_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


def is_sharded(parameter: Tensor) -> bool:
    """Return whether a role holds only a shard of the parameter."""
    return isinstance(parameter, DTensor)


def slice_of(parameter: Tensor) -> str:
    """Return which shard of a parameter this role holds, and how it is cut."""
    if not isinstance(parameter, DTensor):
        return ""
    roles = parameter.device_mesh.mesh
    cut = zip(parameter.placements, _coordinate(roles), roles.shape, strict=True)
    return ",".join(f"{p}:{at}/{size}" for p, at, size in cut if not p.is_replicate())


def forget_meshes() -> None:
    """Clear DTensor's caches, whose meshes equal those of the next role: from the caches the next
    parameters would get the coordinates and groups of the former role."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()


def _coordinate(roles: Tensor) -> list[int]:
    """Return the coordinates of this role in a mesh."""
    return [int(place) for place in (roles == dist.get_rank()).nonzero()[0]]


class Wrappers:
    """The wrappers of one model; to be made while no operation is under way. Raises
    UnsupportedState for wrappers with which a recovered run would continue with other numbers."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._training = {module: module.training for module in modules}
        self._replicated: list[Any] = [
            module for module in modules if isinstance(module, DistributedDataParallel)
        ]
        sharded: list[Any] = [module for module in modules if isinstance(module, FSDPModule)]
        if any(isinstance(module, FullyShardedDataParallel) for module in modules):
            raise UnsupportedState("FullyShardedDataParallel: only fully_shard is supported")
        for replica in self._replicated:
            if not replica.find_unused_parameters or replica.static_graph:
                raise UnsupportedState(
                    "DistributedDataParallel changes its buckets, and with them the order of sums,"
                    " after the first step of a process: give it find_unused_parameters=True and"
                    " no static_graph"
                )
        if sharded and not hasattr(FSDPModule, "reset_iter_state"):
            raise UnsupportedState(f"FSDP2 of torch {torch.__version__}: 2.13 is the oldest")
        # Otherwise the first forward pass would do this, and move parameters.
        for module in sharded:
            module._get_fsdp_state()._lazy_init()
        self._roots = [module for module in sharded if module._get_fsdp_state()._is_root]
        self._switches = [(owner, name, getattr(owner, name)) for owner, name in self._switched()]

    def replicas(self, parameter: Tensor) -> list[int]:
        """Return the roles that hold the same bytes of a parameter and of its optimizer's state."""
        if isinstance(parameter, DTensor):
            roles = parameter.device_mesh.mesh
            index = tuple(
                slice(None) if placement.is_replicate() else place
                for placement, place in zip(parameter.placements, _coordinate(roles), strict=True)
            )
            return [int(role) for role in roles[index].flatten()]
        for replica in self._replicated:
            if any(parameter is held for held in replica.parameters()):
                return dist.get_process_group_ranks(replica.process_group)
        return [dist.get_rank()]

    def forget_in_flight(self) -> None:
        """Drop the remains of an interrupted step, without communication.

        The gradients of unsharded parameters are dropped, too: if a pass did not reach its
        reduction, the next pass would add to them. A gather under way is dropped before FSDP can
        wait for it, since that wait would raise EpochClosed.
        """
        for replica in self._replicated:
            replica._update_process_group(replica.process_group)
        for group in self._groups():
            group._all_gather_result = None
        for root in self._roots:
            root.reset_iter_state()
        for group in self._groups():
            for sharded in group.fsdp_params:
                sharded.unsharded_accumulated_grad = None
                if hasattr(sharded, "_unsharded_param"):
                    sharded._unsharded_param.grad = None
        for owner, name, value in self._switches:
            setattr(owner, name, value)
        for module, is_training in self._training.items():
            module.training = is_training
            for parameter in module.parameters(recurse=False):
                parameter.grad = None

    def _states(self) -> Iterator[Any]:
        """Yield FSDP's states, each of one or several modules."""
        for root in self._roots:
            yield from root._get_fsdp_state()._state_ctx.all_states

    def _groups(self) -> Iterator[Any]:
        """Yield FSDP's groups of parameters that are gathered together."""
        for state in self._states():
            yield from state._fsdp_param_groups

    def _switched(self) -> Iterator[tuple[Any, str]]:
        for group in self._groups():
            yield from ((group, name) for name in _SWITCHES)
        for root in self._roots:
            yield root._get_fsdp_state()._state_ctx, "is_last_backward"
