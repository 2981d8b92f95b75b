"""Loads an optimizer from a checkpoint exactly where PyTorch's own Adam does the updates.

That is the case if neither Apex nor Transformer Engine is installed. Megatron 0.16.1 writes such
checkpoints completely but does not load all of them; the comments below name the gaps.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer, optimizer as base

from deadpool_megatron.megatron.loop_extras import overrides_schedule
from deadpool_megatron.megatron.optimizer import (
    complete_state,
    group_rates,
    inner_optimizers,
    is_distributed,
)
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.state.initial_state import complete_by_trial

_States = dict[torch.Tensor, dict[str, Any]]
_Change = Callable[[dict[str, Any]], None]
# Keys that identify the kind of a parameter group.
_KIND_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config")


@contextlib.contextmanager
def exact_load(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """While the block runs, have ``optimizer.load_state_dict`` load all saved state.

    The sharded state to load into has to be made in the block as well. Optimizer state keeps its
    tensors: references to them see the loaded values. Other optimizers than PyTorch's Adam are left
    to Megatron. If the command line overrides the schedule, it also overrides the rates of
    parameter groups.
    """
    for part in inner_optimizers(optimizer):
        if getattr(part, "init_state_fn", complete_state) is None and not is_distributed(part):
            # Megatron calls this function, of the parts that have it, to create state into which it
            # loads. For SGD it is None.
            part.init_state_fn = complete_by_trial
    inner = [
        part
        for part in inner_optimizers(optimizer)
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
    ]
    changes = [_keep_rates(optimizer)] if overrides_schedule(scheduler) else []
    # These groups must be distinguished, too: a distributed optimizer loads its own groups before
    # it gets the saved groups.
    own = [part.optimizer.param_groups for part in inner_optimizers(optimizer)]
    if not inner:
        with _groups_distinguished(own), _changed_before_load(optimizer, changes):
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
        stack.enter_context(_groups_distinguished(own))
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
    """Call ``original``, Megatron's load_checkpoint(), and load the optimizer exactly.

    Megatron saves random states by pipeline and tensor rank only (checkpointing.py:336). The random
    states of each role are in the extras files of the checkpoint (vault/disk/extras_file.py).
    """
    bound = inspect.signature(original).bind(*args, **kwargs).arguments
    if bound.get("optimizer") is None:
        return original(*args, **kwargs)
    with exact_load(bound["optimizer"], bound.get("opt_param_scheduler")):
        return original(*args, **kwargs)


def _supply_zero_step(loaded: dict[str, Any]) -> None:
    """Add Adam's step where it is zero: optimizer.py:845 does not write it then.

    A run in fp16 makes no step while it searches for its loss scale.
    """
    state = loaded.get("state", {})
    states = [value for value in state.values() if isinstance(value, dict)]
    lacks = any("exp_avg" in each for each in states) and not any("step" in each for each in states)
    if lacks and "common_step" not in state:
        state["common_step"] = torch.tensor(0.0)


def _keep_rates(optimizer: Any) -> _Change:
    """Return a change that gives loaded parameter groups the rates of the command line.

    Before 0.19 the rates of the checkpoint count, whatever schedule is requested. Since 0.19
    Megatron identifies groups by their rates, and would not find a group with other rates. Groups
    of one kind that have several rates are left alone.
    """
    rates: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for group, own in group_rates(optimizer):
        rates.setdefault(_kind(group), []).append(own)

    def change(loaded: dict[str, Any]) -> None:
        for group in loaded.get("param_groups", ()):
            own = rates.get(_kind(group), [])
            if own and all(each == own[0] for each in own):
                group.update(own[0])

    return change


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in _KIND_KEYS)


@contextlib.contextmanager
def _groups_distinguished(lists: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[None]:
    """While the block runs, have Megatron identify parameter groups by their rates as well, if
    several groups of a list are of one kind, as with --decoupled-lr: before 0.19 it would load the
    same group into all of them (optimizer.py:383)."""
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
    """Make changes to the state of each inner optimizer before it is loaded in the block."""
    load: Callable[[Any], None] = optimizer.load_state_dict
    several = len(getattr(optimizer, "chained_optimizers", ())) > 1

    def load_state_dict(loaded: Any) -> None:
        parts = loaded if isinstance(loaded, list) else loaded.values() if several else [loaded]
        for part, change in itertools.product(parts, changes):
            change(part.get("optimizer", part))
        # The loaded groups are those of role 0, which may have more groups than this role.
        with _groups_distinguished(
            part.get("optimizer", part).get("param_groups", ()) for part in parts
        ):
            load(loaded)

    with replaced(optimizer, load_state_dict=load_state_dict):
        yield


@contextlib.contextmanager
def _missing_entries_kept(inner: Any) -> Iterator[None]:
    """Keep the values of entries that a checkpoint lacks: only some formats have the steps.

    distrib_optimizer.py:940 needs all entries of the state, and fails with the format of
    --dist-ckpt-optim-fully-reshardable.
    """
    set_states: Callable[[Any, dict[str, Any]], None] = inner._set_main_param_and_optimizer_states

    def set_present_entries(parameter: Any, loaded: dict[str, Any]) -> None:
        present = inner._get_main_param_and_optimizer_states(parameter)
        set_states(parameter, {**present, **loaded})

    with replaced(inner, _set_main_param_and_optimizer_states=set_present_entries):
        yield


def _put_back(adam: torch.optim.Optimizer, kept: _States) -> None:
    """Restore the tensors from before a failed load: the load shares one step among all parameters,
    and after the next load Adam would advance that step once per parameter."""
    for group in adam.param_groups:
        group.pop("step", None)
        for parameter in group["params"]:
            adam.state[parameter] = dict(kept[parameter])


def _restore_identity(adam: torch.optim.Optimizer, kept: _States) -> None:
    """Move loaded values into the tensors from before the load.

    The steps of a distributed optimizer need more than that. Only its groups get the loaded step:
    distrib_optimizer.py:825 makes a tensor of it that all parameters share, so that Adam would
    advance it once per parameter, and :940 then overwrites it with the step from before the load.
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
