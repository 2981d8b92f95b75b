"""The state of a torch optimizer: tensors in fixed places, and its other values.

Of a DTensor, only the local shard belongs to the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deadpool_megatron.state.parts import move_into_arenas

# Optimizers that keep nothing but tensors for a parameter, and change the tensors in place.
_IN_PLACE = frozenset({"Adam", "AdamW", "FusedAdam", "SGD"})
# The present place of a tensor in a parameter's state: name of the tensor, mapping, key. A load of
# a checkpoint replaces mappings as well.
Place = tuple[str, MutableMapping[Any, Any], str]


class UnsupportedState(ValueError):
    """An optimizer, a precision or a model with unknown or too much unique state; the message has
    the reason."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this role's shard of a DTensor, and any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def changes_in_place(optimizer: Any) -> bool:
    """Return whether the optimizer is known to replace no tensor in an update. Otherwise each
    update needs a check."""
    return type(optimizer).__name__ in _IN_PLACE


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def places(optimizer: Any, parameter: Tensor) -> Iterator[Place]:
    """Yield the places of all tensors that an optimizer keeps for a parameter."""
    state = optimizer.state[parameter]
    for key in sorted(state):
        if isinstance(state[key], Tensor) and state[key] is not parameter:
            yield key, state, key


class OptimizerState:
    """The tensors of an optimizer, packed if possible: the parameters that it updates, and their
    state.

    Packing moves tensors that own their memory into flat arenas. If an update, or a load of a
    checkpoint, replaces tensors, :meth:`readopt` moves the new values there. ``tensors`` cover all
    the bytes, in an order that is equal in equal roles. With ``fixed`` parameters are not moved,
    because others read them where they are.
    """

    def __init__(
        self,
        optimizer: Any,
        places_of: Callable[[Any, Tensor], Iterable[Place]] = places,
        *,
        fixed: bool,
    ) -> None:
        self._optimizer = optimizer
        self._places_of = places_of
        self._entries = [
            _Entry(parameter, name, tensor)
            for parameter in parameters_of(optimizer)
            for name, tensor in (
                ("", parameter),
                *((name, owner[key]) for name, owner, key in places_of(optimizer, parameter)),
            )
        ]
        movable = [entry.local for entry in self._entries if entry.name or not fixed]
        parameters = [entry.local for entry in self._entries if not entry.name and fixed]
        self.tensors = [*move_into_arenas(movable), *parameters]
        for entry in self._entries:
            entry.settle()

    def readopt(self) -> None:
        """Move the values of tensors that were replaced into the packed tensors. Raises
        UnsupportedState for state that did not exist at the start."""
        with torch.no_grad():
            for _, group in itertools.groupby(self._entries, lambda entry: id(entry.parameter)):
                entries = list(group)
                parameter = entries[0].parameter
                places = self._places_of(self._optimizer, parameter)
                present = {name: (owner, key) for name, owner, key in places}
                present[""] = {"": parameter}, ""
                for entry in entries:
                    entry.readopt(*present.pop(entry.name))
                if present:
                    kind, names = type(self._optimizer).__name__, ", ".join(present)
                    raise UnsupportedState(f"{kind} keeps {names}, which it did not at its start")

    def release(self) -> None:
        """Give the model's parameters memory of their own again, so that the layout for its next
        optimizer is that of a role that was newly built."""
        for entry in self._entries:
            if not entry.name and isinstance(entry.parameter, torch.nn.Parameter):
                entry.local.data = entry.local.detach().clone()


class _Entry:
    """A tensor of an optimizer: a parameter that it updates (``name`` is empty), or a tensor of the
    parameter's state."""

    def __init__(self, parameter: Tensor, name: str, tensor: Tensor) -> None:
        self.parameter, self.name, self.tensor = parameter, name, tensor

    @property
    def local(self) -> Tensor:
        """Return this role's shard of the tensor."""
        return local_tensor(self.tensor)

    def settle(self) -> None:
        """Remember the tensor's memory after packing."""
        self._place = self.local.detach()

    def readopt(self, owner: MutableMapping[Any, Any], key: str) -> None:
        """Copy the current value, which is at ``key`` of ``owner``, into the remembered memory, and
        let the current tensor use that memory."""
        current = local_tensor(owner[key])
        if current.data_ptr() == self._place.data_ptr():
            return
        self._place.copy_(current.detach())
        if (current.dtype, current.device) == (self._place.dtype, self._place.device):
            current.data = self._place  # other references to the tensor remain valid
            return
        self.local.data = self._place
        owner[key] = self.tensor


def group_values(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the plain values of parameter groups, which a scheduler sets (lr, weight decay), or a
    load of a checkpoint (betas).

    FusedAdam counts its steps in the groups, from its first step on. The steps and the learning
    rate of a capturable Adam are tensors.
    """
    plain = (int, float, bool, str, tuple, Tensor)
    return [{k: v for k, v in group.items() if isinstance(v, plain)} for group in groups]


def restore_group_values(
    groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]]
) -> None:
    """Restore the values of :func:`group_values` in place, and remove values that are not among
    them.

    A count of steps that an interrupted first iteration or a warm-up has left, for example, would
    correct the bias of the moments for the wrong step.
    """
    for group, saved in zip(groups, values, strict=True):
        for key, value in list(group.items()):
            is_plain = isinstance(value, int | float | bool | str | Tensor)
            if is_plain and key not in saved:
                del group[key]
        for key, value in saved.items():
            if not isinstance(value, Tensor):
                # The extras have a list instead of a tuple, as JSON has no tuples.
                group[key] = tuple(value) if isinstance(value, list) else value
            elif isinstance(live := group.get(key), Tensor):
                live.copy_(value)
            else:
                device = next((p.device for p in group["params"]), torch.device("cpu"))
                group[key] = value.to(device, copy=True)


def plain_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values in the state of a parameter that are no tensors."""
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


def restore_plain_values(state: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Restore the values of :func:`plain_values`, and remove other plain values."""
    for key in plain_values(state).keys() - values.keys():
        del state[key]
    state.update(values)
