"""Loads an optimizer from a checkpoint exactly where PyTorch's own Adam does the updates.

That is so wherever neither Apex nor Transformer Engine is installed. Megatron 0.16.1 writes such
checkpoints completely but does not bring everything back; each place below says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deadpool_megatron.hooks.capture.first_state import complete_state
from deadpool_megatron.hooks.capture.optimizer import (
    inner_optimizers,
    is_distributed,
)

_States = dict[torch.Tensor, dict[str, Any]]


@contextlib.contextmanager
def exact_load(optimizer: Any) -> Iterator[None]:
    """Within, ``optimizer.load_state_dict`` brings back what was saved, all of it.

    The sharded state to load into has to be made within as well. Optimizer state keeps its tensors:
    whoever refers to them sees the loaded values. Other optimizers than Adam of PyTorch are left to
    Megatron.
    """
    for part in inner_optimizers(optimizer):
        if getattr(part, "init_state_fn", complete_state) is None and not is_distributed(part):
            # Megatron calls it to have what it can load into, and has none for SGD.
            part.init_state_fn = functools.partial(_complete, part)
    inner = [
        part
        for part in inner_optimizers(optimizer)
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
    ]
    if not inner:
        yield
        return
    # distrib_optimizer.py:642 asserts that there is one step, and finds none before the first.
    complete_state(optimizer)
    kept = [
        {parameter: dict(state) for parameter, state in part.optimizer.state.items()}
        for part in inner
    ]
    with contextlib.ExitStack() as changes:
        # fp32 master parameters are leaf views that require gradients; distrib_optimizer.py:940
        # copies into them.
        changes.enter_context(torch.no_grad())
        changes.enter_context(_zero_steps_supplied(optimizer))
        for part in filter(is_distributed, inner):
            changes.enter_context(_missing_entries_kept(part))
        try:
            yield
        except BaseException:
            for part, states in zip(inner, kept, strict=True):
                _put_back(part.optimizer, states)
            raise
        for part, states in zip(inner, kept, strict=True):
            _restore_identity(part.optimizer, states)


def _complete(part: Any, *_: Any) -> None:
    complete_state(part)


def load_exactly(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``original``, Megatron's load_checkpoint(), and have the optimizer come back exactly.

    Nothing is left to do for the rest: Megatron saves the random generators of each pipeline and
    tensor rank, and of each data-parallel rank where these differ (checkpointing.py:336).
    """
    optimizer = inspect.signature(original).bind(*args, **kwargs).arguments.get("optimizer")
    if optimizer is None:
        return original(*args, **kwargs)
    with exact_load(optimizer):
        return original(*args, **kwargs)


@contextlib.contextmanager
def _zero_steps_supplied(optimizer: Any) -> Iterator[None]:
    """Put back Adam's step where it is zero: optimizer.py:845 does not write it then.

    A run in fp16 has made no step while it looks for its loss scale.
    """
    load: Callable[[Any], None] = optimizer.load_state_dict
    several = len(getattr(optimizer, "chained_optimizers", ())) > 1

    def load_state_dict(loaded: Any) -> None:
        parts = loaded if isinstance(loaded, list) else loaded.values() if several else [loaded]
        for part in parts:
            state = part.get("optimizer", part).get("state", {})
            if state and not any(key == "common_step" or "step" in state[key] for key in state):
                state["common_step"] = torch.tensor(0.0)
        load(loaded)

    optimizer.load_state_dict = load_state_dict
    try:
        yield
    finally:
        del optimizer.load_state_dict


@contextlib.contextmanager
def _missing_entries_kept(inner: Any) -> Iterator[None]:
    """Leave alone what a checkpoint does not have: only some formats have the steps once more.

    distrib_optimizer.py:940 wants all that is in the state, and fails with the format of
    --dist-ckpt-optim-fully-reshardable.
    """
    set_states: Callable[[Any, dict[str, Any]], None] = inner._set_main_param_and_optimizer_states

    def set_what_is_there(parameter: Any, loaded: dict[str, Any]) -> None:
        present = inner._get_main_param_and_optimizer_states(parameter)
        set_states(parameter, {**present, **loaded})

    inner._set_main_param_and_optimizer_states = set_what_is_there
    try:
        yield
    finally:
        del inner._set_main_param_and_optimizer_states


def _put_back(adam: torch.optim.Optimizer, kept: _States) -> None:
    """Have the tensors from before a load that failed: with the one step that it shares out among
    all parameters, the next load would have Adam advance it once per parameter."""
    for group in adam.param_groups:
        group.pop("step", None)
        for parameter in group["params"]:
            adam.state[parameter] = dict(kept[parameter])


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
