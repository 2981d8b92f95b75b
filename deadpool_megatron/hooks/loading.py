"""Loads an optimizer from a checkpoint exactly where PyTorch's own Adam does the updates.

That is so wherever neither Apex nor Transformer Engine is installed. Megatron 0.16.1 writes such
checkpoints completely but does not bring everything back; each place below says what is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deadpool_megatron.hooks.optimizer import complete_state, inner_optimizers

_States = dict[torch.Tensor, dict[str, Any]]


@contextlib.contextmanager
def exact_load(optimizer: Any) -> Iterator[None]:
    """Within, ``optimizer.load_state_dict`` brings back what was saved, all of it.

    The sharded state to load into has to be made within as well. Optimizer state keeps its tensors:
    whoever refers to them sees the loaded values. Other optimizers than Adam of PyTorch are left to
    Megatron.
    """
    adams = [
        inner.optimizer
        for inner in inner_optimizers(optimizer)
        if isinstance(inner.optimizer, torch.optim.Adam | torch.optim.AdamW)
    ]
    if not adams:
        yield
        return
    # distrib_optimizer.py:642 asserts that there is one step, and finds none before the first.
    complete_state(optimizer)
    kept = [{parameter: dict(state) for parameter, state in adam.state.items()} for adam in adams]
    # fp32 master parameters are leaf views that require gradients; distrib_optimizer.py:940
    # copies into them.
    with torch.no_grad(), _zero_steps_supplied(optimizer):
        yield
        for adam, states in zip(adams, kept, strict=True):
            _restore_identity(adam, states)


@contextlib.contextmanager
def _zero_steps_supplied(optimizer: Any) -> Iterator[None]:
    """Put back Adam's step where it is zero: optimizer.py:845 does not write it then.

    A run in fp16 has made no step while it looks for its loss scale.
    """
    load: Callable[[Any], None] = optimizer.load_state_dict
    several = len(getattr(optimizer, "chained_optimizers", ())) > 1

    def load_state_dict(loaded: Any) -> None:
        for part in loaded.values() if several else [loaded]:
            state = part.get("optimizer", part).get("state")
            if state is not None:
                state.setdefault("common_step", torch.tensor(0.0))
        load(loaded)

    optimizer.load_state_dict = load_state_dict
    try:
        yield
    finally:
        del optimizer.load_state_dict


def _restore_identity(adam: torch.optim.Optimizer, kept: _States) -> None:
    """Move loaded values into the tensors that were there before the load.

    The steps of a distributed optimizer need more than that. Only its groups get the loaded number:
    distrib_optimizer.py:825 makes one tensor of it that all parameters share, so that Adam would
    advance it once per parameter, and :940 then overwrites it with the number from before the load.
    """
    for group in adam.param_groups:
        step = group.pop("step", None)
        for parameter in group["params"]:
            loaded = dict(adam.state[parameter])
            if step is not None:
                loaded["step"] = step
            for name, tensor in kept[parameter].items():
                value = loaded[name]
                if isinstance(value, torch.Tensor) and value is not tensor:
                    tensor.copy_(value)
                elif isinstance(value, int | float):
                    tensor.fill_(value)
            adam.state[parameter] = kept[parameter]
