"""Megatron's extras: everything an iteration changes that is not in a shard part (traps, A4)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from deadpool_megatron.hooks.loop import ProtectedLoop
from deadpool_megatron.hooks.optimizer import (
    inner_optimizers,
    param_group_values,
    restore_param_group_values,
)
from deadpool_megatron.state.extras import (
    ExtrasError,
    capture_random_states,
    restore_random_states,
)


def capture(loop: ProtectedLoop) -> dict[str, Any]:
    """Extras of the loop as it stands; values are copies or are encoded before the next change."""
    values: dict[str, Any] = {
        "counters": dict(loop.counters),
        "log_sums": {name: float(value).hex() for name, value in loop.log_sums.items()},
        "scheduler.num_steps": loop.scheduler.num_steps,
        "param_groups": param_group_values(loop.optimizer),
    }
    for index, inner in enumerate(inner_optimizers(loop.optimizer)):
        scaler = getattr(inner, "grad_scaler", None)
        if scaler is not None:
            for key, value in scaler.state_dict().items():
                values[f"scaler{index}.{key}"] = value
    values["extra_state"] = loop.extra_state()
    for name, tensor in _buffers(loop):
        values[f"buffer.{name}"] = tensor
    for name, entry in _loss_sums().items():
        if "values" in entry:
            values[f"aux.{name}"] = entry["values"]
    for name, tensor in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        values[f"random.tracker.{name}"] = tensor
    values.update(capture_random_states())
    return values


def restore(loop: ProtectedLoop, values: dict[str, Any]) -> None:
    """Put extras back in place, except what :func:`restore_last` does.

    Raises ExtrasError when the loop has other buffers than the one that was captured.
    """
    _check_buffers(loop, values)
    loop.counters.clear()
    loop.counters.update(values["counters"])
    loop.log_sums.clear()
    loop.log_sums.update({k: float.fromhex(v) for k, v in values["log_sums"].items()})
    # Set, not load_state_dict: that one adds the steps to the live value.
    loop.scheduler.num_steps = values["scheduler.num_steps"]
    restore_param_group_values(loop.optimizer, values["param_groups"])
    for index, inner in enumerate(inner_optimizers(loop.optimizer)):
        scaler = getattr(inner, "grad_scaler", None)
        if scaler is not None:
            state = {
                key: values[f"scaler{index}.{key}"]
                for key in scaler.state_dict()
                if f"scaler{index}.{key}" in values
            }
            if state:
                # Decoded tensors are fresh: the scaler may keep them (it does, on the CPU).
                scaler.load_state_dict(state)
    loop.restore_extra_state(values["extra_state"])
    with torch.no_grad():
        for name, tensor in _buffers(loop):
            tensor.copy_(values[f"buffer.{name}"])


def restore_last(values: dict[str, Any]) -> None:
    """Put back what rebuilding the data loaders may touch: loss sums, and the random states."""
    _restore_loss_sums(values)
    prefix = "random.tracker."
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    if states:
        tracker.set_states(states)
    restore_random_states(values)


def _buffers(loop: ProtectedLoop) -> list[tuple[str, Tensor]]:
    """Every module buffer, persistent or not (expert bias, token counts, amax), and frozen weights.

    Frozen parameters are in no optimizer and in no gather: nothing else would bring them back.
    """
    found: list[tuple[str, Tensor]] = []
    for index, chunk in enumerate(loop.model_chunks):
        found += [(f"{index}.{name}", buffer) for name, buffer in chunk.named_buffers()]
        found += [
            (f"{index}.{name}", parameter.detach())
            for name, parameter in chunk.named_parameters()
            if not parameter.requires_grad
        ]
    return found


def _check_buffers(loop: ProtectedLoop, values: dict[str, Any]) -> None:
    """A buffer that only one of two loops has cannot be restored, or would be forgotten."""
    live = {f"buffer.{name}" for name, _ in _buffers(loop)}
    kept = {name for name in values if name.startswith("buffer.")}
    if live != kept:
        raise ExtrasError(
            "buffers and frozen parameters differ from those that were captured:"
            f" {', '.join(sorted(live ^ kept)[:5])}"
        )


def _loss_sums() -> dict[str, dict[str, Any]]:
    """The process-wide running sums of losses that are only logged, by name."""
    sums = {f"moe.{name}": entry for name, entry in get_moe_layer_wise_logging_tracker().items()}
    return {**sums, "mtp": MTPLossLoggingHelper.tracker}


def _restore_loss_sums(values: dict[str, Any]) -> None:
    """Set those captured, make those that this process has not met yet, zero all others."""
    prefix = "aux."
    kept = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, sums in kept.items():
        family, _, own = name.partition(".")
        entry = (
            MTPLossLoggingHelper.tracker
            if family == "mtp"
            else get_moe_layer_wise_logging_tracker().setdefault(own, {})
        )
        if "values" in entry:
            entry["values"].copy_(sums)
        else:
            entry["values"] = sums.to(device, copy=True)
    for name, entry in _loss_sums().items():
        if name not in kept and "values" in entry:
            entry["values"].zero_()
