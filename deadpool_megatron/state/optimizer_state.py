"""The state of a torch optimizer: tensors in fixed places, and its other values.

A tensor may be a DTensor; then its part is the local shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deadpool_megatron.state.parts import move_into_arenas

# They keep nothing but tensors for a parameter, and change them in place.
_IN_PLACE = frozenset({"Adam", "AdamW", "FusedAdam", "SGD"})
# A tensor of a parameter's state: its name, and the mapping and key where it is found now. A load
# replaces mappings as well.
Place = tuple[str, MutableMapping[Any, Any], str]


class UnsupportedState(ValueError):
    """An optimizer, a precision or a model with unknown or too much unique state; the message has
    the reason."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this role's shard of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def changes_in_place(optimizer: Any) -> bool:
    """Return whether updates are known to replace no tensor, so that no check is needed after
    each."""
    return type(optimizer).__name__ in _IN_PLACE


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def places(optimizer: Any, parameter: Tensor) -> Iterator[Place]:
    """Yield every tensor that an optimizer keeps for a parameter."""
    state = optimizer.state[parameter]
    for key in sorted(state):
        if isinstance(state[key], Tensor) and state[key] is not parameter:
            yield key, state, key


class OptimizerState:
    """Tensors of one optimizer, packed where possible: parameters that it updates, and their state.

    Packing re-points tensors that own their memory into flat arenas; :meth:`readopt` puts that
    back after an update or a load of a checkpoint has put others in their place. ``tensors`` cover
    all the bytes, in an order that is equal in equal roles. ``fixed``: parameters stay where they
    are, because others read them there.
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
        self._kept = [
            _Kept(parameter, name, tensor)
            for parameter in parameters_of(optimizer)
            for name, tensor in (
                ("", parameter),
                *((name, owner[key]) for name, owner, key in places_of(optimizer, parameter)),
            )
        ]
        movable = [kept.local for kept in self._kept if kept.name or not fixed]
        unmoved = [kept.local for kept in self._kept if not kept.name and fixed]
        self.tensors = [*move_into_arenas(movable), *unmoved]
        for kept in self._kept:
            kept.settle()

    def readopt(self) -> None:
        """Move what has been replaced back into the packed tensors. Values do not change. Raises
        UnsupportedState for state that was not there before."""
        with torch.no_grad():
            for _, group in itertools.groupby(self._kept, lambda kept: id(kept.parameter)):
                some = list(group)
                parameter = some[0].parameter
                found = self._places_of(self._optimizer, parameter)
                present = {name: (owner, key) for name, owner, key in found}
                present[""] = {"": parameter}, ""
                for kept in some:
                    kept.readopt(*present.pop(kept.name))
                if present:
                    kind, more = type(self._optimizer).__name__, ", ".join(present)
                    raise UnsupportedState(f"{kind} keeps {more}, which it did not at its start")

    def release(self) -> None:
        """Give parameters of the model memory of their own, as before they were packed: the layout
        for its next optimizer must be that of a role that was built again."""
        for kept in self._kept:
            if not kept.name and isinstance(kept.parameter, torch.nn.Parameter):
                kept.local.data = kept.local.detach().clone()


class _Kept:
    """One tensor of an optimizer: a parameter that it updates (``name`` empty), or its state."""

    def __init__(self, parameter: Tensor, name: str, tensor: Tensor) -> None:
        self.parameter, self.name, self.tensor = parameter, name, tensor

    @property
    def local(self) -> Tensor:
        """Return this role's shard of it."""
        return local_tensor(self.tensor)

    def settle(self) -> None:
        """Remember the memory the tensor has now, after packing."""
        self._place = self.local.detach()

    def readopt(self, owner: MutableMapping[Any, Any], key: str) -> None:
        """Copy the current value, which ``owner`` has, into the remembered memory."""
        current = local_tensor(owner[key])
        if current.data_ptr() == self._place.data_ptr():
            return
        self._place.copy_(current.detach())
        if (current.dtype, current.device) == (self._place.dtype, self._place.device):
            current.data = self._place  # other owners of it keep the same
            return
        self.local.data = self._place
        owner[key] = self.tensor


def group_values(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the plain values of parameter groups, as set by the scheduler (lr, weight decay) and
    by a load from a checkpoint (betas).

    FusedAdam counts its steps here, too, from its first step on. Steps and learning rate of a
    capturable Adam are tensors.
    """
    plain = (int, float, bool, str, tuple, Tensor)
    return [{k: v for k, v in group.items() if isinstance(v, plain)} for group in groups]


def restore_group_values(
    groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]]
) -> None:
    """Restore the values of :func:`group_values`, in place; later values are removed.

    A remaining count of steps, of an interrupted first iteration or of a warm-up, would correct the
    bias of the moments for the wrong step.
    """
    for group, kept in zip(groups, values, strict=True):
        for key, value in list(group.items()):
            known = isinstance(value, int | float | bool | str | Tensor)
            if known and key not in kept:
                del group[key]
        for key, value in kept.items():
            if not isinstance(value, Tensor):
                # A list was a tuple: JSON has none.
                group[key] = tuple(value) if isinstance(value, list) else value
            elif isinstance(live := group.get(key), Tensor):
                live.copy_(value)
            else:
                device = next((p.device for p in group["params"]), torch.device("cpu"))
                group[key] = value.to(device, copy=True)


def plain_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in the state of a parameter that are no tensors."""
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


def restore_plain_values(state: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Inverse of :func:`plain_values`."""
    for key in plain_values(state).keys() - values.keys():
        del state[key]
    state.update(values)
