"""Loads an optimizer from a checkpoint exactly where PyTorch's own Adam does the updates.

That is so wherever neither Apex nor Transformer Engine is installed. Megatron 0.16.1 writes such
checkpoints completely but does not bring everything back; each place below says what is missing.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer, optimizer as base

from deadpool_megatron.megatron.loop_extras import command_counts
from deadpool_megatron.megatron.optimizer import (
    complete_state,
    group_rates,
    inner_optimizers,
    is_distributed,
)
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.state.initial_state import complete_as_tried

_States = dict[torch.Tensor, dict[str, Any]]
_Change = Callable[[dict[str, Any]], None]
# Of a parameter group, beside its rates.
_OF_A_KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config")


@contextlib.contextmanager
def exact_load(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Within, ``optimizer.load_state_dict`` brings back what was saved, all of it.

    The sharded state to load into has to be made within as well. Optimizer state keeps its tensors:
    whoever refers to them sees the loaded values. Other optimizers than Adam of PyTorch are left to
    Megatron. Where the command line counts for ``scheduler``, it does for parameter groups.
    """
    for part in inner_optimizers(optimizer):
        if getattr(part, "init_state_fn", complete_state) is None and not is_distributed(part):
            # Megatron calls it to have what it can load into, and has none for SGD.
            part.init_state_fn = complete_as_tried
    inner = [
        part
        for part in inner_optimizers(optimizer)
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
    ]
    changes = [_keep_rates(optimizer)] if command_counts(scheduler) else []
    # A distributed optimizer loads its own state before it is given what was saved.
    own = [part.optimizer.param_groups for part in inner_optimizers(optimizer)]
    if not inner:
        with _groups_told_apart(own), _changed_before_load(optimizer, changes):
            yield
        return
    # distrib_optimizer.py:642 asserts that there is one step, and finds none before the first.
    complete_state(optimizer)
    kept = [
        {parameter: dict(state) for parameter, state in part.optimizer.state.items()}
        for part in inner
    ]
    with contextlib.ExitStack() as stack:
        # fp32 master parameters are leaf views that require gradients; distrib_optimizer.py:940
        # copies into them.
        stack.enter_context(torch.no_grad())
        changes.append(_supply_zero_step)
        stack.enter_context(_groups_told_apart(own))
        stack.enter_context(_changed_before_load(optimizer, changes))
        for part in filter(is_distributed, inner):
            stack.enter_context(_missing_entries_kept(part))
        try:
            yield
        except BaseException:
            for part, states in zip(inner, kept, strict=True):
                _put_back(part.optimizer, states)
            raise
        for part, states in zip(inner, kept, strict=True):
            _restore_identity(part.optimizer, states)


def load_exactly(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``original``, Megatron's load_checkpoint(), and have the optimizer come back exactly.

    Of random states Megatron saves those of each pipeline and tensor rank (checkpointing.py:336):
    what else a role has lies beside the checkpoint (vault/disk/extras_file.py).
    """
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if given.get("optimizer") is None:
        return original(*args, **kwargs)
    with exact_load(given["optimizer"], given.get("opt_param_scheduler")):
        return original(*args, **kwargs)


def _supply_zero_step(loaded: dict[str, Any]) -> None:
    """Put back Adam's step where it is zero: optimizer.py:845 does not write it then.

    A run in fp16 has made no step while it looks for its loss scale.
    """
    state = loaded.get("state", {})
    own = [one for one in state.values() if isinstance(one, dict)]
    adam = any("exp_avg" in one for one in own) and not any("step" in one for one in own)
    if adam and "common_step" not in state:
        state["common_step"] = torch.tensor(0.0)


def _keep_rates(optimizer: Any) -> _Change:
    """Have loaded parameter groups go by the rates of the command line.

    Before 0.19 those of the checkpoint count, whatever the scheduler is told; from then on Megatron
    knows the groups by their rates, and finds none. Groups of a kind that have several rates are
    left alone.
    """
    rates: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for group, own in group_rates(optimizer):
        rates.setdefault(_kind(group), []).append(own)

    def change(loaded: dict[str, Any]) -> None:
        for group in loaded.get("param_groups", ()):
            own = rates.get(_kind(group), [])
            if own and all(one == own[0] for one in own):
                group.update(own[0])

    return change


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in _OF_A_KIND)


@contextlib.contextmanager
def _groups_told_apart(lists: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[None]:
    """Within, Megatron knows parameter groups by their rates as well where several of a list are of
    a kind, as with --decoupled-lr: before 0.19 it takes one of them for all (optimizer.py:383)."""
    keys = base.param_group_identifier_keys
    if any(
        len(groups) > len({tuple(map(group.get, keys)) for group in groups}) for groups in lists
    ):
        keys = (*keys, "max_lr", "min_lr")
    name = "param_group_identifier_keys"
    with replaced(base, **{name: keys}), replaced(distrib_optimizer, **{name: keys}):
        yield


@contextlib.contextmanager
def _changed_before_load(optimizer: Any, changes: Sequence[_Change]) -> Iterator[None]:
    """Within, make changes to the state of each inner optimizer before it is loaded."""
    load: Callable[[Any], None] = optimizer.load_state_dict
    several = len(getattr(optimizer, "chained_optimizers", ())) > 1

    def load_state_dict(loaded: Any) -> None:
        parts = loaded if isinstance(loaded, list) else loaded.values() if several else [loaded]
        for part, change in itertools.product(parts, changes):
            change(part.get("optimizer", part))
        # Of role 0, which may have more of them than this one.
        with _groups_told_apart(
            part.get("optimizer", part).get("param_groups", ()) for part in parts
        ):
            load(loaded)

    with replaced(optimizer, load_state_dict=load_state_dict):
        yield


@contextlib.contextmanager
def _missing_entries_kept(inner: Any) -> Iterator[None]:
    """Leave alone what a checkpoint does not have: only some formats have the steps once more.

    distrib_optimizer.py:940 wants all that is in the state, and fails with the format of
    --dist-ckpt-optim-fully-reshardable.
    """
    set_states: Callable[[Any, dict[str, Any]], None] = inner._set_main_param_and_optimizer_states

    def set_present_entries(parameter: Any, loaded: dict[str, Any]) -> None:
        present = inner._get_main_param_and_optimizer_states(parameter)
        set_states(parameter, {**present, **loaded})

    with replaced(inner, _set_main_param_and_optimizer_states=set_present_entries):
        yield


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
