"""The state of optimizers before their first update: what that would begin with, made before it.

The layout of a slot must be fixed by then. Where neither PyTorch, Transformer Engine nor Megatron
says with what an optimizer begins, a first update of copies shows it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deadpool_megatron.megatron.optimizer import (
    inner_optimizers,
    is_hybrid,
    parameters_of,
    updating,
)
from deadpool_megatron.member.framework import UnsupportedState

_KEEPABLE = (Tensor, int, float, bool, str, tuple, type(None))


def complete_state(optimizer: Any) -> None:
    """Create the state that the optimizer would create in its first step, with the same values.

    Raises UnsupportedState for state that is neither tensor nor number, or that cannot be there
    before.
    """
    for inner in inner_optimizers(optimizer):
        for one in updating(inner):
            is_torchs = isinstance(one, torch.optim.Adam | torch.optim.AdamW)
            if is_torchs and not any(group["amsgrad"] for group in one.param_groups):
                _complete_torch_adam(one)
            elif hasattr(one, "initialize_state"):
                _complete_fused_adam(one)
            elif (make := getattr(inner, "init_state_fn", None)) is not None:
                # Megatron's own; for Apex two zeros, as wide as the parameter (fp32).
                make(one, inner.config)
            else:
                complete_as_tried(one)
        if is_hybrid(inner):
            inner.optimizer._sync_sub_optimizers_state_to_hdo()
        states = [inner.optimizer.state[parameter] for parameter in parameters_of(inner)]
        for kept in (*inner.optimizer.param_groups, *states):
            _refuse_what_nobody_can_keep(type(inner.optimizer).__name__, kept)


def _refuse_what_nobody_can_keep(kind: str, kept: Mapping[str, Any]) -> None:
    """``kept``: a parameter group, or the state of a parameter."""
    for key, value in kept.items():
        # Classes and functions are code.
        if key == "params" or isinstance(value, _KEEPABLE) or callable(value):
            continue
        what = type(value).__name__
        raise UnsupportedState(f"{kind} keeps {key}, a {what}: neither a tensor nor a number")


def _complete_torch_adam(adam: Any) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter.detach())
                state["exp_avg_sq"] = torch.zeros_like(parameter.detach())


def _complete_fused_adam(adam: Any) -> None:
    """As its ``step`` does for a parameter that it has not met.

    Not through Megatron's ``init_state_fn``: that one leaves out the second argument, and without
    the precision-aware optimizer it knows of no master weights.
    """
    for group in adam.param_groups:
        for parameter in group["params"]:
            if adam.state[parameter]:
                continue
            remainders = getattr(adam, "store_param_remainders", None)
            if remainders is None:  # before Transformer Engine 2.1
                adam.initialize_state(parameter)
            else:
                both = bool(remainders) and parameter.dtype == torch.bfloat16
                adam.initialize_state(parameter, both)


def complete_as_tried(optimizer: Any, *_: Any) -> None:
    """Zeros, where a first update of copies shows that they are the same as no state; or negative
    ones: to these a first gradient is added without losing the sign of its zeros, and the momentum
    of SGD begins as a copy of it. No random numbers are drawn."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            count = torch.arange(parameter.numel(), device=parameter.device)
            zeros = torch.zeros_like(parameter.detach())
            gradients = [-zeros, (count % 7 - 3).view(zeros.shape).to(zeros.dtype)]
            wanted = [_first_update(optimizer, group, parameter, one, {}) for one in gradients]
            for fill in (0.0, -0.0):
                state = {key: _begun(value, fill) for key, value in wanted[0].items() if key}
                made = [_first_update(optimizer, group, parameter, g, state) for g in gradients]
                if all(map(_same_state, made, wanted)):
                    optimizer.state[parameter] = state
                    break
            else:
                kind = type(optimizer).__name__
                raise UnsupportedState(f"{kind} makes its state of its first gradient")


def _first_update(
    optimizer: Any, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: Any
) -> dict[str, Any]:
    """The state that an update of a copy leaves, and the copy under the empty name."""
    copy = parameter.detach().clone()
    copy.grad = gradient.clone()
    shadow = without_hooks(optimizer)
    copied = {key: _begun(value) for key, value in state.items()}
    shadow.state = defaultdict(dict, {copy: copied} if copied else {})
    # At a rate that shows what it does: a warm-up begins with none.
    shadow.param_groups = [{**group, "lr": 0.125, "params": [copy]}]
    with torch.no_grad():
        type(shadow).step(shadow)
    return {"": copy, **shadow.state[copy]}


def _begun(value: Any, fill: float | None = None) -> Any:
    """A copy of a value of a state; with ``fill``, as it is before a first update."""
    if isinstance(value, Tensor):
        return value.clone() if fill is None else torch.full_like(value, fill)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return type(value)(0) if is_number and fill is not None else value


def _same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        same_bytes(value, other[key]) if isinstance(value, Tensor) else value == other[key]
        for key, value in one.items()
    )


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors bit for bit, wherever they are."""

    def raw(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

    return torch.equal(raw(one), raw(other))


def without_hooks(optimizer: Any) -> Any:
    """The same optimizer on the same state, whose step calls nobody."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__[name] = OrderedDict()
    return shadow
