"""The state of a loop: named tensors, and values.

A sharded tensor stands for the shard of this role, even while FSDP has gathered the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deadpool_megatron.state.digest import Entry, generator_entries
from deadpool_megatron.state.extras import encode, refuse_other_tensors
from deadpool_megatron.state.optimizer_state import (
    UnsupportedState,
    group_values,
    local_tensor,
    parameters_of,
    places,
    plain_values,
    restore_group_values,
    restore_plain_values,
)
from deadpool_megatron.torch_native.plain_state import from_plain, to_plain

if TYPE_CHECKING:
    from deadpool_megatron.torch_native.loop import TorchLoop

# Attributes of a loop with a state_dict() of values, not tensors.
_STATEFUL = ("scheduler", "grad_scaler")


class LoopState:
    """The state of one loop. Create it after the loop is complete, before the first forward
    pass. After that, FSDP may have a gathered parameter instead of the sharded parameter."""

    def __init__(self, loop: TorchLoop) -> None:
        self._loop = loop
        self._parameters = dict(loop.model.named_parameters())
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        updated = parameters_of(loop.optimizer)
        if any(id(parameter) not in names for parameter in updated):
            raise UnsupportedState("the optimizer has parameters that the model does not have")
        #: the names of the parameters that the optimizer updates, in the optimizer's order
        self.updated = [names[id(parameter)] for parameter in updated]

    def not_updated(self) -> dict[str, Tensor]:
        """Return the tensors that no optimizer updates: all buffers, and frozen weights."""
        frozen = self._parameters.keys() - set(self.updated)
        buffers = self._loop.model.named_buffers()
        return self._weights(sorted(frozen)) | {
            f"buffer.{name}": buffer for name, buffer in buffers
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return all live tensors."""
        found = self._weights(self.updated) | self.not_updated()
        optimizer = self._loop.optimizer
        for name, parameter in zip(self.updated, parameters_of(optimizer), strict=True):
            for key, state, _ in places(optimizer, parameter):
                found[f"optimizer.{name}.{key}"] = local_tensor(state[key])
        return found

    def values(self) -> dict[str, Any]:
        """Return all state except tensors and random states, as values of extras."""
        loop, optimizer = self._loop, self._loop.optimizer
        states = [plain_values(optimizer.state[p]) for p in parameters_of(optimizer)]
        return {
            "counters": dict(loop.counters),
            "log_sums": {name: float(value).hex() for name, value in loop.log_sums.items()},
            "param_groups": group_values(optimizer.param_groups),
            "state_numbers": to_plain(states if any(states) else [], "the optimizer"),
            **{name: to_plain(kept.state_dict(), name) for name, kept in self._stateful()},
            "extra_state": loop.extra_state(),
        }

    def restore_values(self, values: Mapping[str, Any]) -> None:
        """Inverse of :meth:`values`, in place."""
        loop, optimizer = self._loop, self._loop.optimizer
        loop.counters.clear()
        loop.counters.update(values["counters"])
        loop.log_sums.clear()
        loop.log_sums.update({k: float.fromhex(v) for k, v in values["log_sums"].items()})
        for name, target in self._stateful():
            if state := from_plain(values[name]):
                target.load_state_dict(state)
        restore_group_values(optimizer.param_groups, values["param_groups"])
        numbers = from_plain(values["state_numbers"])
        for parameter, kept in zip(parameters_of(optimizer), numbers, strict=False):
            restore_plain_values(optimizer.state[parameter], kept)
        loop.restore_extra_state(values["extra_state"])

    def digest_entries(self) -> Iterator[Entry]:
        """Yield the values and random states, for a digest."""
        for name, value in self.values().items():
            yield name, encode({name: value}).hex()
        yield from generator_entries()

    def _weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {f"model.{name}": local_tensor(self._parameters[name].detach()) for name in names}

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        for name in _STATEFUL:
            if (found := getattr(self._loop, name)) is not None:
                yield name, found


def copy_by_name(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy ``saved`` tensors into ``live``. Raises ExtrasError if ``saved`` is of another model."""
    refuse_other_tensors(live, saved, "tensors of the model differ")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])
