"""Plain PyTorch as a framework: the state of a loop, for the member that protects it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.member.framework import Framework, StepCalls
from deadpool_megatron.member.frozen_weights import are_large
from deadpool_megatron.member.peer_comparison import PeerMismatch, gather_by_role
from deadpool_megatron.state import initial_state
from deadpool_megatron.state.digest import short_digests
from deadpool_megatron.state.extras import capture_random_states, restore_random_states
from deadpool_megatron.state.optimizer_state import (
    OptimizerState,
    UnsupportedState,
    changes_in_place,
    parameters_of,
)
from deadpool_megatron.state.parts import Part, fingerprint
from deadpool_megatron.torch_native.loop_state import copy_by_name
from deadpool_megatron.torch_native.wrappers import Wrappers, is_sharded, slice_of

if TYPE_CHECKING:
    from deadpool_megatron.torch_native.loop import TorchLoop


class TorchFramework(Framework):
    """See :class:`Framework`. There is one optimizer, so there is one part. ``slots`` is 3, as no
    collective over all roles lies between the gate and the update."""

    slots = 3
    versions = (torch.__version__,)

    def __init__(self, loop: TorchLoop) -> None:
        optimizer: Any = loop.optimizer
        kind, is_torch = type(optimizer), isinstance(optimizer, torch.optim.Optimizer)
        # Optimizers of torch.distributed.optim keep the state in other optimizers.
        if not is_torch or kind.__module__.startswith("torch.distributed."):
            raise UnsupportedState(f"{kind.__name__} does not keep its state as torch.optim does")
        self._loop, self._wrappers = loop, Wrappers(loop.model)
        initial_state.complete(optimizer)
        initial_state.refuse_unknown_values(optimizer)
        self._values = loop.state
        parameters = parameters_of(optimizer)
        # FSDP gathers parameters from its own memory, so their shards must stay there.
        self._state = OptimizerState(optimizer, fixed=any(map(is_sharded, parameters)))
        replicas = [set(self._wrappers.replicas(parameter)) for parameter in parameters]
        common = set.intersection(*replicas) if replicas else {dist.get_rank()}
        part = Part("shard0", self._state.tensors, sorted(common))
        tensors = self._values.tensors().items()
        contents = [f"{name}|{tuple(tensor.shape)}|{tensor.dtype}" for name, tensor in tensors]
        contents += map(slice_of, parameters)
        part.meaning = hashlib.sha256("\n".join(contents).encode()).hexdigest()
        self.parts, self.peers = [part], list(range(dist.get_world_size()))

    def meaning(self) -> str:
        """See :class:`Framework`."""
        return f"role {dist.get_rank()} of {dist.get_world_size()}, {self._loop.stage_class()}"

    def install(self, calls: StepCalls) -> None:
        """See :class:`Framework`."""
        optimizer = self._loop.optimizer
        optimizer.register_step_pre_hook(lambda *_: calls.gate())
        calls._replace(after=[self._readopt_updated, *calls.after]).surround(optimizer, 0)

    def capture(self) -> dict[str, Any]:
        """See :class:`Framework`."""
        values = {**self._values.values(), **capture_random_states()}
        return {**values, **{f"tensor.{name}": tensor for name, tensor in self._small().items()}}

    def restore(self, values: dict[str, Any]) -> None:
        """See :class:`Framework`."""
        saved = {k.removeprefix("tensor."): v for k, v in values.items() if k.startswith("tensor.")}
        copy_by_name(self._small(), saved)
        self._values.restore_values(values)

    def restore_last(self, values: dict[str, Any]) -> None:
        """See :class:`Framework`."""
        restore_random_states(values)

    def readopt(self) -> None:
        """See :class:`Framework`."""
        self._state.readopt()

    def release(self) -> None:
        """See :class:`Framework`."""
        self._state.release()

    def synchronise(self) -> None:
        """See :class:`Framework`. Do nothing: the slots of each role hold all its state."""

    def verify(self) -> None:
        """See :class:`Framework`."""
        (part,) = self.parts
        device = next((tensor.device for tensor in part.tensors), torch.device("cpu"))
        assert dist.group.WORLD is not None
        found = gather_by_role(fingerprint(part.tensors, device), dist.group.WORLD)
        own = found[dist.get_rank()]
        if bad := [role for role in part.replicas if not torch.equal(found[role], own)]:
            raise PeerMismatch(f"the replicas of roles {bad} differ from role {dist.get_rank()}")

    def forget_in_flight(self) -> None:
        """See :class:`Framework`."""
        self._wrappers.forget_in_flight()
        if (scaler := self._loop.grad_scaler) is not None:
            scaler._per_optimizer_states.clear()

    def entry_digests(self) -> dict[str, str]:
        """See :class:`Framework`."""
        return short_digests(self._values.digest_entries())

    def large_frozen_weights(self) -> Sequence[tuple[str, Tensor]]:
        """See :class:`Framework`."""
        small = self._small()
        return [(k, v) for k, v in self._values.not_updated().items() if k not in small]

    def _small(self) -> dict[str, Tensor]:
        """Return the tensors that are captured with the extras, because they are small or may
        change. Frozen weights of the model are left out if they are large."""
        found = self._values.not_updated()
        frozen = {name: tensor for name, tensor in found.items() if name.startswith("model.")}
        if are_large(frozen.values()):
            found = {name: tensor for name, tensor in found.items() if name not in frozen}
        return found

    def _readopt_updated(self, _: int) -> None:
        """Move state that an update has replaced with new tensors back into the part."""
        if not changes_in_place(self._loop.optimizer):
            self._state.readopt()
