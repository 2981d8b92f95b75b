"""The initial state of a torch optimizer, created before its first update.

The layout of a slot must be fixed by then. Where PyTorch does not document the initial state of an
optimizer, a first update of copies shows it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deadpool_megatron.state.optimizer_state import UnsupportedState, local_tensor, parameters_of
from deadpool_megatron.state.parts import flat_bytes

_KEEPABLE = (Tensor, int, float, bool, str, tuple, type(None))


def complete(optimizer: Any) -> None:
    """Create the state that a torch optimizer would create in its first step, with the same values.

    Raises UnsupportedState where it cannot be there before.
    """
    if is_plain_adam(optimizer):
        complete_adam(optimizer)
    else:
        complete_as_tried(optimizer)


def refuse_unknown_values(optimizer: Any) -> None:
    """Raise UnsupportedState for a value that is neither tensor nor number, in a parameter group or
    in the state of a parameter."""
    kind = type(optimizer).__name__
    states = [optimizer.state[parameter] for parameter in parameters_of(optimizer)]
    for kept in (*optimizer.param_groups, *states):
        for key, value in kept.items():
            # Classes and functions are code.
            if key != "params" and not isinstance(value, _KEEPABLE) and not callable(value):
                found = f"{kind} keeps {key}, a {type(value).__name__}"
                raise UnsupportedState(f"{found}: neither a tensor nor a number")


def is_plain_adam(optimizer: Any) -> bool:
    """Return whether it is torch's Adam or AdamW with the two usual moments."""
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return is_adam and not any(group["amsgrad"] for group in optimizer.param_groups)


def complete_adam(adam: Any) -> None:
    """Complete torch's Adam or AdamW."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter.detach())
                state["exp_avg_sq"] = torch.zeros_like(parameter.detach())


def complete_as_tried(optimizer: Any, *_: Any) -> None:
    """Create zeros, where a first update of copies proves them equal to no state, or negative
    zeros: a first gradient added to these keeps the sign of its zeros, as the momentum of SGD
    begins as a copy of the gradient. No random numbers are drawn."""
    for group in optimizer.param_groups:
        for whole in group["params"]:
            if optimizer.state[whole]:
                continue
            parameter = local_tensor(whole.detach())
            count = torch.arange(parameter.numel(), device=parameter.device)
            zeros = torch.zeros_like(parameter)
            gradients = [-zeros, (count % 7 - 3).view(zeros.shape).to(zeros.dtype)]
            wanted = [_first_update(optimizer, group, parameter, g, {}) for g in gradients]
            for fill in (0.0, -0.0):
                state = {key: _begun(value, fill) for key, value in wanted[0].items() if key}
                made = [_first_update(optimizer, group, parameter, g, state) for g in gradients]
                if all(map(_same_state, made, wanted)):
                    optimizer.state[whole] = {k: _shaped_as(whole, v) for k, v in state.items()}
                    break
            else:
                kind = type(optimizer).__name__
                raise UnsupportedState(f"{kind} makes its state of its first gradient")


def _shaped_as(parameter: Tensor, value: Any) -> Any:
    """Return a value of the state of a local shard as that of the whole DTensor."""
    whole = parameter.detach()
    local = local_tensor(whole)
    if local is whole or not isinstance(value, Tensor) or value.shape != local.shape:
        return value
    made = torch.zeros_like(whole, dtype=value.dtype)
    local_tensor(made).copy_(value)
    return made


def _first_update(
    optimizer: Any, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: Any
) -> dict[str, Any]:
    """Return the state that an update of a copy leaves, and the copy under the empty name."""
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
    """Return a copy of a value of a state; with ``fill``, as it is before a first update."""
    if isinstance(value, Tensor):
        return value.clone() if fill is None else torch.full_like(value, fill)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return type(value)(0) if is_number and fill is not None else value


def _same_state(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        same_bytes(value, second[key]) if isinstance(value, Tensor) else value == second[key]
        for key, value in first.items()
    )


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Compare two tensors bit for bit, wherever they are."""
    return torch.equal(flat_bytes(first).cpu(), flat_bytes(second).cpu())


def without_hooks(optimizer: Any) -> Any:
    """Return the same optimizer on the same state, with a step that calls no hooks."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__[name] = OrderedDict()
    return shadow
