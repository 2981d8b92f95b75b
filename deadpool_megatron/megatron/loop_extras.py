"""Megatron's extras: all state that an iteration changes and no shard part holds.

Some of this state lies neither in buffers nor in Megatron's checkpoints:

* Plain attributes. An evaluation adds to ``current_max_attn_logits`` of attention
  (transformer_engine.py, ``TEDotProductAttention``), and the next step logs it
  (optimizer/qk_clip.py). The rerun machine finds a spike by counts and largest values
  (rerun_state_machine.py, ``is_unexpectedly_large``).
* Process-wide sums of losses that are only logged. The sums of experts lie in a dictionary up to
  megatron-core 0.17, and in a ``MoEMetricsTracker`` since; those of multi-token prediction lie in a
  dictionary, with other keys since 0.19. In all cases an entry has tensors, and the groups over
  which they are summed when they are logged.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from megatron.core import parallel_state, rerun_state_machine, tensor_parallel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from deadpool_megatron.megatron import fp8, optimizer
from deadpool_megatron.megatron.loop import MegatronLoop, trains_in_fp8
from deadpool_megatron.member.frozen_weights import are_large
from deadpool_megatron.state.extras import (
    capture_random_states,
    refuse_other_tensors,
    restore_random_states,
)

try:
    from megatron.core.transformer.moe import moe_logging
except ImportError:  # before 0.18
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    moe_logging = None

_LOGITS = "current_max_attn_logits"

# Losses that are only logged: names among the extras, and fields of Megatron's entries.
_SUMS = "loss_sums"
_SUM_GROUPS = ("reduce_group", "avg_group")
_SWITCHES = ("reduce_group_has_dp", "needs_dp_avg")
_MTP = "mtp"
_MOE = "moe."
_LoggedLoss = MutableMapping[str, Any]


def capture(loop: MegatronLoop) -> dict[str, Any]:
    """Return the extras of the loop; values are copies, or are encoded before the next change."""
    values: dict[str, Any] = {
        "counters": dict(loop.counters),
        "log_sums": {name: float(value).hex() for name, value in loop.log_sums.items()},
        "scheduler.num_steps": loop.scheduler.num_steps,
        "schedule": _schedule(loop.scheduler),
        "param_groups": optimizer.param_group_values(loop.optimizer),
        "state_numbers": optimizer.state_numbers(loop.optimizer),
    }
    scalers = optimizer.loss_scalers(loop.optimizer)
    values["scalers"] = {name: scaler.state_dict() for name, scaler in scalers.items()}
    values["extra_state"] = loop.extra_state()
    for name, tensor in frozen_and_buffers(loop):
        values[f"buffer.{name}"] = tensor
    values.update(capture_loss_sums())
    if trains_in_fp8(loop):
        values.update(fp8.capture(loop))
    values.update(capture_attributes(loop))
    values.update(random_states())
    return values


def tracked_random_states() -> dict[str, Tensor]:
    """Return Megatron's own random states, by name.

    Transformer Engine's tracker, and Megatron's for CUDA graphs, keep generators for them
    (Transformer Engine, pytorch/distributed.py; Megatron-core, core/tensor_parallel/random.py).
    """
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in states.items()
    }


def restore(loop: MegatronLoop, values: dict[str, Any]) -> None:
    """Restore extras in place, except those of :func:`restore_last`.

    Raises ExtrasError if the loop has other buffers, or of other shapes, than the captured loop.
    """
    _check_buffers(loop, values)
    loop.counters.clear()
    loop.counters.update(values["counters"])
    loop.log_sums.clear()
    loop.log_sums.update({k: float.fromhex(v) for k, v in values["log_sums"].items()})
    # Steps are set directly, since load_state_dict would add them to the live value.
    rates, is_overridden = optimizer.group_rates(loop.optimizer), overrides_schedule(loop.scheduler)
    if getattr(loop.scheduler, "use_checkpoint_opt_param_scheduler", False):
        vars(loop.scheduler).update(values["schedule"])
    loop.scheduler.num_steps = values["scheduler.num_steps"]
    optimizer.restore_param_group_values(loop.optimizer, values["param_groups"])
    if is_overridden:
        for group, own in rates:
            group.update(own)
        loop.scheduler.step(increment=0)
    optimizer.restore_state_numbers(loop.optimizer, values["state_numbers"])
    for name, scaler in optimizer.loss_scalers(loop.optimizer).items():
        if state := values["scalers"].get(name):
            # The scaler may keep the decoded tensors (on the CPU it does): no other code has them.
            scaler.load_state_dict(state)
    loop.restore_extra_state(values["extra_state"])
    _restore_buffers(loop, values)
    if trains_in_fp8(loop) or "fp8.layout" in values:
        fp8.restore(loop, values)
    restore_attributes(loop, values)


def capture_passing(loop: MegatronLoop) -> dict[str, Any]:
    """Return the part of :func:`capture` that a forward and backward pass changes."""
    values = {f"buffer.{name}": tensor for name, tensor in frozen_and_buffers(loop)}
    values |= capture_logits(loop)
    return {**values, **capture_loss_sums(), **random_states()}


def restore_passing(loop: MegatronLoop, values: dict[str, Any]) -> None:
    """Inverse of :func:`capture_passing`. Raises ExtrasError as :func:`restore` does."""
    _check_buffers(loop, values)
    _restore_buffers(loop, values)
    restore_attributes(loop, values)
    restore_last(values)


def random_states() -> dict[str, Any]:
    """Return all random states: Megatron's own and those of Python, numpy and torch."""
    return {"random.tracker": tracked_random_states(), **capture_random_states()}


def set_random_states(values: dict[str, Any]) -> None:
    """Inverse of :func:`random_states`. A tracker keeps its generators: other objects refer to
    them."""
    states, tracker = dict(values["random.tracker"]), tensor_parallel.get_cuda_rng_tracker()
    for name, live in tracker.get_states().items():
        if isinstance(live, torch.Generator) and name in states:
            live.set_state(states[name])
            states[name] = live
    if states:
        tracker.set_states(states)
    restore_random_states(values)


def restore_last(values: dict[str, Any]) -> None:
    """Restore the state that a rebuild of the data loaders may change: loss sums, random states."""
    restore_loss_sums(values)
    set_random_states(values)


def _schedule(scheduler: Any) -> dict[str, Any]:
    """Return the settings of Megatron's scheduler, and its count of steps; empty for any other
    scheduler.

    With --use-checkpoint-opt-param-scheduler a load takes the settings from the checkpoint, while a
    process that takes over a role later loads no checkpoint.
    """
    is_megatrons = hasattr(scheduler, "use_checkpoint_opt_param_scheduler")
    return scheduler.state_dict() if is_megatrons else {}


def overrides_schedule(scheduler: Any) -> bool:
    """Return whether the schedule of the command line counts instead of that of the state, as with
    --override-opt-param-scheduler."""
    return bool(getattr(scheduler, "override_opt_param_scheduler", False))


def schedule_difference(loop: MegatronLoop, values: dict[str, Any]) -> str:
    """Return the first difference between the schedules of the state and of the command line, as
    Megatron's load compares them; empty if there is none, or if the state's is requested."""
    own, kept = _schedule(loop.scheduler), values["schedule"]
    if not own or loop.scheduler.use_checkpoint_opt_param_scheduler:
        return ""
    ignored = {"num_steps"}
    ignored |= {"lr_decay_steps"} if own["lr_decay_style"] == "constant" else set()
    ignored |= {"wd_incr_steps"} if own["wd_incr_style"] == "constant" else set()
    found = [(name, kept[name], own[name]) for name in own if name in kept.keys() - ignored]
    groups = [group for inner in values["param_groups"] for group in inner]
    for (_, rates), group in zip(optimizer.group_rates(loop.optimizer), groups, strict=False):
        found += [(name, group.get(name), rate) for name, rate in rates.items()]
    for name, there, here in found:
        if there != here:
            return f"{name} is {there} in the state and {here} on the command line"
    return ""


def frozen_and_buffers(loop: MegatronLoop) -> list[tuple[str, Tensor]]:
    """Return every lasting buffer, persistent or not (expert bias, token counts, amax), and frozen
    weights unless they are large.

    Frozen parameters are in no optimizer and in no gather, so only the extras can restore them.
    """
    found: list[tuple[str, Tensor]] = []
    for index, chunk in enumerate(loop.model_chunks):
        found += [(f"{index}.{name}", buffer) for name, buffer in lasting_buffers(chunk)]
    return found if large_frozen_weights(loop) else found + _frozen_weights(loop)


def lasting_buffers(chunk: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Return all buffers of a model chunk, except tables that a module recomputes when needed.

    The tables of YaRN follow from arguments alone, and plain attributes show whether they are valid
    (yarn_rotary_pos_embedding.py, get_cached_cos_sin): restored tables from before the first
    forward pass would be used although that pass makes tables of another length and dtype.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, module in chunk.named_modules():
        own = vars(module)
        if own["_buffers"] and "max_seq_len_cached" not in own:
            for buffer_name, buffer in module.named_buffers(name, recurse=False):
                found.setdefault(id(buffer), (buffer_name, buffer))
    return list(found.values())


def large_frozen_weights(loop: MegatronLoop) -> list[tuple[str, Tensor]]:
    """Return all frozen weights of the role if they are large, or else none."""
    frozen = _frozen_weights(loop)
    return frozen if are_large(parameter for _, parameter in frozen) else []


def _frozen_weights(loop: MegatronLoop) -> list[tuple[str, Tensor]]:
    return [
        (f"{index}.{name}", parameter)
        for index, chunk in enumerate(loop.model_chunks)
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    ]


def _check_buffers(loop: MegatronLoop, values: dict[str, Any]) -> None:
    """Raise ExtrasError for a buffer that only the live or only the captured loop has."""
    live = {f"buffer.{name}": tensor for name, tensor in frozen_and_buffers(loop)}
    kept = {name: value for name, value in values.items() if name.startswith("buffer.")}
    subject = "buffers and frozen parameters differ from those that were captured"
    refuse_other_tensors(live, kept, subject)


def _restore_buffers(loop: MegatronLoop, values: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, tensor in frozen_and_buffers(loop):
            value = values[f"buffer.{name}"]
            if tensor.dtype != value.dtype:
                # Megatron keeps the expert bias in fp32, but only from the first forward pass on
                # (router.py, _maintain_float32_expert_bias), which this process may not have made.
                tensor.data = value.to(tensor.device, copy=True)
            tensor.copy_(value)


def capture_attributes(loop: MegatronLoop) -> dict[str, Any]:
    """Return the extras that are plain attributes."""
    values = capture_logits(loop)
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None:
        values["rerun"] = {
            "counts": dict(machine.large_value_counts),
            "largest": {name: float(value).hex() for name, value in machine.max_values.items()},
            "first_is_over": bool(machine.first_iteration_complete),
        }
    return values


def capture_logits(loop: MegatronLoop) -> dict[str, Any]:
    """Return the largest logits, the attributes that a pass changes even if the rerun machine is
    bypassed."""
    return {f"logits.{name}": tensor for name, tensor in largest_logits(loop)}


def restore_attributes(loop: MegatronLoop, values: dict[str, Any]) -> None:
    """Inverse of :func:`capture_attributes`."""
    for name, module, device in _attention(loop):
        found = values.get(f"logits.{name}")
        setattr(module, _LOGITS, None if found is None else found.to(device))
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None and (kept := values.get("rerun")) is not None:
        machine.large_value_counts = dict(kept["counts"])
        machine.max_values = {name: float.fromhex(text) for name, text in kept["largest"].items()}
        machine.first_iteration_complete = kept["first_is_over"]


def largest_logits(loop: MegatronLoop) -> Iterator[tuple[str, Tensor]]:
    """Yield the largest logits of each head, for each attention with any since the last clip."""
    for name, module, _ in _attention(loop):
        if (found := vars(module)[_LOGITS]) is not None:
            yield name, found.detach()  # some versions keep the graph of every batch alive by it


def _attention(loop: MegatronLoop) -> Iterator[tuple[str, torch.nn.Module, torch.device]]:
    for index, chunk in enumerate(loop.model_chunks):
        device = None
        for name, module in chunk.named_modules():
            if _LOGITS in vars(module):  # hasattr() takes a microsecond to find it missing
                device = device or next(chunk.parameters()).device
                yield f"{index}.{name}", module, device


def capture_loss_sums() -> dict[str, Any]:
    """Return the sums of logged losses, and the groups over which they are summed; tensors are not
    copied."""
    return {
        _SUMS: {
            name: {"sums": sums, "groups": _summed_over(entry)}
            for name, entry in logged_losses().items()
            if (sums := _sums_of(entry))
        }
    }


def restore_loss_sums(values: dict[str, Any]) -> None:
    """Set the captured sums, create those that this process lacks, and zero all other sums."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, kept in values[_SUMS].items():
        for key, sums in kept["sums"].items():
            entry = logged_losses().get(name)
            if entry is None:
                entry = _new_loss(name, sums.to(device, copy=True))
            if key in entry:
                entry[key].copy_(sums)
            else:
                entry[key] = sums.to(device, copy=True)
            entry.update(_groups_of(kept["groups"]))
    for name, entry in logged_losses().items():
        own, known = _sums_of(entry), values[_SUMS].get(name, {"sums": {}})["sums"]
        unknown = {key: value for key, value in own.items() if key not in known}
        for tensor in unknown.values():
            tensor.zero_()
        if unknown and len(unknown) == len(own):
            entry.update(dict.fromkeys(_SUM_GROUPS))


def logged_losses() -> dict[str, _LoggedLoss]:
    """Return Megatron's live entries by name."""
    found = {f"{_MOE}{name}": _fields(entry) for name, entry in expert_losses().items()}
    return {**found, _MTP: MTPLossLoggingHelper.tracker}


def expert_losses() -> MutableMapping[str, Any]:
    if moe_logging is None:
        tracker: MutableMapping[str, Any] = get_moe_layer_wise_logging_tracker()
        return tracker
    metrics: MutableMapping[str, Any] = moe_logging.get_moe_metrics_tracker().metrics
    return metrics


def _fields(entry: Any) -> _LoggedLoss:
    return entry if isinstance(entry, dict) else vars(entry)


def _new_loss(name: str, values: Tensor) -> _LoggedLoss:
    """Create an entry for a loss of experts; the entry of multi-token prediction always exists."""
    entry = {} if moe_logging is None else moe_logging.MetricEntry(values=values)
    expert_losses()[name.removeprefix(_MOE)] = entry
    return _fields(entry)


def _sums_of(entry: _LoggedLoss) -> dict[str, Tensor]:
    return {key: value for key, value in entry.items() if isinstance(value, Tensor)}


def _summed_over(entry: _LoggedLoss) -> dict[str, Any]:
    """Return the groups over which an entry is summed when it is logged, as parallel_state names
    them.

    A forward pass sets them. A process that logs the restored step before its first forward pass
    would omit these communications, or use groups of its previous role.
    """
    names = {id(value): name for name, value in vars(parallel_state).items()}
    found: dict[str, Any] = {key: bool(entry[key]) for key in _SWITCHES if key in entry}
    for key in _SUM_GROUPS:
        group = entry.get(key)
        # A group that parallel_state does not have cannot be found again, and stays as it is.
        if group is None or id(group) in names:
            found[key] = None if group is None else names[id(group)]
    return found


def _groups_of(kept: dict[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`_summed_over`."""
    return {
        key: getattr(parallel_state, name) if isinstance(name, str) else name
        for key, name in kept.items()
    }
