"""The replay of an update of an inner optimizer, from its previous state and its gradients.

The ``step`` of the live optimizer's own class makes the update, with the optimizer's flags, on
tensors of the same device: with the same implementation (for-each, fused), equal bytes give equal
numbers. The comparison with the owner's state proves that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deadpool_megatron.megatron import optimizer as optimizers
from deadpool_megatron.state.initial_state import without_hooks
from deadpool_megatron.state.optimizer_state import (
    group_values,
    restore_group_values,
)
from deadpool_megatron.state.parts import batches

# Device memory that a replay takes at a time for previous state and gradients, approximately.
_CHUNK_BYTES = 64 << 20
# Optimizers whose update depends only on parameters, state, gradients and values of the groups.
_KNOWN = frozenset({"Adam", "AdamW", "FusedAdam"})


def replay_refusal(optimizer: Any) -> str:
    """Return the reason why the same update could give other bytes; empty if it cannot."""
    groups = [group for inner in optimizers.param_group_values(optimizer) for group in inner]
    if any(isinstance(value, Tensor) for group in groups for value in group.values()):
        return "the optimizer is capturable: its steps and learning rate lie on the device"
    for inner in optimizers.inner_optimizers(optimizer):
        kind = type(inner.optimizer).__name__
        if kind not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            return f"the inputs of an update are known for {known} only, not for {kind}"
        if getattr(getattr(inner, "config", None), "use_precision_aware_optimizer", False):
            return f"the precision-aware {kind} keeps masters and gradients of its own"
        if any(
            optimizers.raw_tensors(value)
            for parameter in optimizers.parameters_of(inner)
            for value in inner.optimizer.state[parameter].values()
            if isinstance(value, Tensor)
        ):
            return f"{kind} keeps quantised state"
    return ""


def plain_group_values(inner: Any) -> tuple[dict[str, Any], ...]:
    """Return the plain values of each parameter group: learning rate, betas, ..."""
    return tuple(group_values(inner.optimizer.param_groups))


@dataclass(frozen=True)
class ParameterCopy:
    """A copy of a parameter with its gradient, and of the state that its optimizer keeps for it.

    ``number``: its number over all groups; ``group``: the number of its group. ``tensors``: the
    parameter under the empty name, then its state; ``values``: state that is no tensor.
    """

    number: int
    group: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        return self.tensors[""]

    @property
    def state(self) -> dict[str, Any]:
        """Return the state that the optimizer keeps for the parameter."""
        return {**self.values, **{name: t for name, t in self.tensors.items() if name}}


def group_numbers(inner: Any) -> list[int]:
    """Return the number of the group of each parameter of :func:`parameters_of`."""
    groups = inner.optimizer.param_groups
    return [number for number, group in enumerate(groups) for _ in group["params"]]


def update_copies(
    inner: Any, groups: Sequence[Mapping[str, Any]], copies: Sequence[ParameterCopy]
) -> None:
    """Update copies of parameters, of this or of another role, as ``inner`` would update its own.

    ``groups``: the plain values of the parameter groups of the role whose copies these are. The
    copies have their gradients.
    """
    shadow = without_hooks(inner.optimizer)
    shadow.state = defaultdict(dict, {copy.parameter: copy.state for copy in copies})
    copied = [
        {**group, "params": [copy.parameter for copy in copies if copy.group == number]}
        for number, group in enumerate(inner.optimizer.param_groups)
    ]
    restore_group_values(copied, groups)
    shadow.param_groups = [group for group in copied if group["params"]]
    _step(shadow)


def _step(adam: Any) -> None:
    # The class's function is called: a learning rate scheduler may have wrapped the live object's.
    with torch.no_grad():
        type(adam).step(adam)


def all_tensors(inner: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter, under the empty name, then the tensors of its optimizer's state."""
    yield "", parameter
    yield from optimizers.state_tensors(inner, parameter).items()


def chunks(inner: Any) -> Iterator[list[Tensor]]:
    """Yield the parameters in batches that need, with their state, ``_CHUNK_BYTES`` at most, or are
    a single parameter."""

    def bytes_of(parameter: Tensor) -> int:
        return sum(tensor.nbytes for _, tensor in all_tensors(inner, parameter))

    return batches(optimizers.parameters_of(inner), bytes_of, _CHUNK_BYTES)
