"""Creates the initial state of a torch optimizer before its first update.

The layout of a slot is fixed before the first update, so the state must exist by then. If PyTorch
does not document the initial state of an optimizer, a first update of copies shows it.
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

    Raises UnsupportedState if the state depends on that step.
    """
    if is_plain_adam(optimizer):
        complete_adam(optimizer)
    else:
        complete_by_trial(optimizer)


def refuse_unknown_values(optimizer: Any) -> None:
    """Raise UnsupportedState for a value that is neither tensor nor number, in a parameter group or
    in the state of a parameter."""
    kind = type(optimizer).__name__
    states = [optimizer.state[parameter] for parameter in parameters_of(optimizer)]
    for values in (*optimizer.param_groups, *states):
        for key, value in values.items():
            # Classes and functions are code, not state.
            if key != "params" and not isinstance(value, _KEEPABLE) and not callable(value):
                text = f"{kind} keeps {key}, a {type(value).__name__}"
                raise UnsupportedState(f"{text}: neither a tensor nor a number")


def is_plain_adam(optimizer: Any) -> bool:
    """Return whether an optimizer is torch's Adam or AdamW with the two usual moments."""
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return is_adam and not any(group["amsgrad"] for group in optimizer.param_groups)


def complete_adam(adam: Any) -> None:
    """Create the state of torch's Adam or AdamW."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter.detach())
                state["exp_avg_sq"] = torch.zeros_like(parameter.detach())


def complete_by_trial(optimizer: Any, *_: Any) -> None:
    """Create a state of zeros, after first updates of copies have shown that these zeros give the
    same result as no state.

    Negative zeros are tried if zeros do not: the momentum of SGD begins as a copy of the gradient,
    and a sum with a negative zero keeps the sign of the gradient's zeros. No random numbers are
    drawn. Raises UnsupportedState if neither gives the same result.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            local = local_tensor(parameter.detach())
            count = torch.arange(local.numel(), device=local.device)
            zeros = torch.zeros_like(local)
            gradients = [-zeros, (count % 7 - 3).view(zeros.shape).to(zeros.dtype)]
            expected = [_first_update(optimizer, group, local, g, {}) for g in gradients]
            for fill in (0.0, -0.0):
                state = {key: _begun(value, fill) for key, value in expected[0].items() if key}
                actual = [_first_update(optimizer, group, local, g, state) for g in gradients]
                if all(map(_same_state, actual, expected)):
                    values = {k: _shaped_as(parameter, v) for k, v in state.items()}
                    optimizer.state[parameter] = values
                    break
            else:
                kind = type(optimizer).__name__
                raise UnsupportedState(f"{kind} makes its state of its first gradient")


def _shaped_as(parameter: Tensor, value: Any) -> Any:
    """Return a value of the state of a local shard as a DTensor like ``parameter``, if that is a
    DTensor and the value has the shape of the shard."""
    whole = parameter.detach()
    local = local_tensor(whole)
    if local is whole or not isinstance(value, Tensor) or value.shape != local.shape:
        return value
    state = torch.zeros_like(whole, dtype=value.dtype)
    local_tensor(state).copy_(value)
    return state


def _first_update(
    optimizer: Any, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: Any
) -> dict[str, Any]:
    """Return the state that a copy of the parameter has after an update, and the updated copy under
    an empty key."""
    copy = parameter.detach().clone()
    copy.grad = gradient.clone()
    shadow = without_hooks(optimizer)
    state_copy = {key: _begun(value) for key, value in state.items()}
    shadow.state = defaultdict(dict, {copy: state_copy} if state_copy else {})
    # A rate at which the update has an effect, as a warm-up begins at 0.
    shadow.param_groups = [{**group, "lr": 0.125, "params": [copy]}]
    with torch.no_grad():
        type(shadow).step(shadow)
    return {"": copy, **shadow.state[copy]}


def _begun(value: Any, fill: float | None = None) -> Any:
    """Return a copy of a value of a state. With ``fill`` return the value before a first update:
    numbers become 0, tensors are filled with ``fill``."""
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
    """Return an optimizer with the same state whose step calls no hooks."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__[name] = OrderedDict()
    return shadow
