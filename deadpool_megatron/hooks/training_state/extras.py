"""Megatron's extras: everything an iteration changes that is not in a shard part (traps, A4)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from deadpool_megatron.hooks.loop import ProtectedLoop
from deadpool_megatron.hooks.training_state import attributes, fp8_state, loss_sums
from deadpool_megatron.hooks.training_state.optimizer import (
    loss_scalers,
    param_group_tensors,
    param_group_values,
    restore_param_group_values,
)
from deadpool_megatron.state.extras import (
    ExtrasError,
    capture_random_states,
    restore_random_states,
)

#: of a role; so many are copied on the main thread and sent to each buddy in every iteration, more
#: are written once (hooks/checkpoints/frozen_weights.py)
MOST_FROZEN_BYTES = 64 << 20


def capture(loop: ProtectedLoop) -> dict[str, Any]:
    """Extras of the loop as it stands; values are copies or are encoded before the next change."""
    values: dict[str, Any] = {
        "counters": dict(loop.counters),
        "log_sums": {name: float(value).hex() for name, value in loop.log_sums.items()},
        "scheduler.num_steps": loop.scheduler.num_steps,
        "schedule": _schedule(loop.scheduler),
        "param_groups": param_group_values(loop.optimizer),
    }
    for place, tensor in param_group_tensors(loop.optimizer).items():
        values[f"param_group.{place}"] = tensor
    for name, scaler in loss_scalers(loop.optimizer).items():
        values.update({f"{name}.{key}": value for key, value in scaler.state_dict().items()})
    values["extra_state"] = loop.extra_state()
    for name, tensor in frozen_and_buffers(loop):
        values[f"buffer.{name}"] = tensor
    values.update(loss_sums.capture())
    values.update(fp8_state.capture(loop))
    values.update(attributes.capture(loop))
    values.update(random_states())
    return values


def tracked_random_states() -> dict[str, Tensor]:
    """Megatron's own random states, by name.

    Transformer Engine's tracker, and Megatron's for CUDA graphs, keep generators for them
    (Transformer Engine, pytorch/distributed.py; Megatron-core, core/tensor_parallel/random.py).
    """
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in states.items()
    }


def restore(loop: ProtectedLoop, values: dict[str, Any]) -> None:
    """Put extras back in place, except what :func:`restore_last` does.

    Raises ExtrasError when the loop has other buffers, or of other shapes, than the one that was
    captured.
    """
    _check_buffers(loop, values)
    loop.counters.clear()
    loop.counters.update(values["counters"])
    loop.log_sums.clear()
    loop.log_sums.update({k: float.fromhex(v) for k, v in values["log_sums"].items()})
    # Set, not load_state_dict: that one adds the steps to the live value.
    if getattr(loop.scheduler, "use_checkpoint_opt_param_scheduler", False):
        vars(loop.scheduler).update(values.get("schedule", {}))
    loop.scheduler.num_steps = values["scheduler.num_steps"]
    restore_param_group_values(
        loop.optimizer, values["param_groups"], _named(values, "param_group.")
    )
    for name, scaler in loss_scalers(loop.optimizer).items():
        if state := _named(values, f"{name}."):
            # Decoded tensors are fresh: the scaler may keep them (it does, on the CPU).
            scaler.load_state_dict(state)
    loop.restore_extra_state(values["extra_state"])
    with torch.no_grad():
        for name, tensor in frozen_and_buffers(loop):
            value = values[f"buffer.{name}"]
            if tensor.dtype != value.dtype:
                # Megatron keeps the expert bias in fp32, but only from the first forward pass on
                # (router.py, _maintain_float32_expert_bias), which this process may not have made.
                tensor.data = value.to(tensor.device, copy=True)
            tensor.copy_(value)
    fp8_state.restore(loop, values)
    attributes.restore(loop, values)


def capture_passing(loop: ProtectedLoop) -> dict[str, Any]:
    """What a forward and backward pass changes beside gradients: a part of :func:`capture`."""
    values = {f"buffer.{name}": tensor for name, tensor in frozen_and_buffers(loop)}
    values |= attributes.capture_passing(loop)
    return {**values, **loss_sums.capture(), **random_states()}


def restore_passing(loop: ProtectedLoop, values: dict[str, Any]) -> None:
    """Inverse of :func:`capture_passing`. Raises ExtrasError as :func:`restore` does."""
    _check_buffers(loop, values)
    with torch.no_grad():
        for name, tensor in frozen_and_buffers(loop):
            tensor.copy_(values[f"buffer.{name}"])
    attributes.restore(loop, values)
    restore_last(values)


def random_states() -> dict[str, Any]:
    """All of them, Megatron's own and those of Python, numpy and torch."""
    tracked = {f"random.tracker.{name}": state for name, state in tracked_random_states().items()}
    return {**tracked, **capture_random_states()}


def set_random_states(values: dict[str, Any]) -> None:
    """Inverse of :func:`random_states`."""
    _restore_tracked(_named(values, "random.tracker."))
    restore_random_states(values)


def restore_last(values: dict[str, Any]) -> None:
    """Put back what rebuilding the data loaders may touch: loss sums, and the random states."""
    loss_sums.restore(values)
    set_random_states(values)


def _schedule(scheduler: Any) -> dict[str, Any]:
    """What Megatron's scheduler goes by beside its count of steps; empty of any other.

    With --use-checkpoint-opt-param-scheduler a load takes it from the checkpoint, and a process
    that takes a role over later has loaded none.
    """
    is_megatrons = hasattr(scheduler, "use_checkpoint_opt_param_scheduler")
    return scheduler.state_dict() if is_megatrons else {}


def _restore_tracked(states: dict[str, Any]) -> None:
    """Set the tracker's states. Its generators stay: a generator refers to one of them."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name, live in tracker.get_states().items():
        if isinstance(live, torch.Generator) and name in states:
            live.set_state(states[name])
            states[name] = live
    if states:
        tracker.set_states(states)


def _named(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def frozen_and_buffers(loop: ProtectedLoop) -> list[tuple[str, Tensor]]:
    """Every lasting buffer, persistent or not (expert bias, token counts, amax), and frozen weights
    unless they are large.

    Frozen parameters are in no optimizer and in no gather: nothing else would bring them back.
    """
    found: list[tuple[str, Tensor]] = []
    for index, chunk in enumerate(loop.model_chunks):
        found += [(f"{index}.{name}", buffer) for name, buffer in lasting_buffers(chunk)]
    frozen = _frozen_weights(loop)
    return found if _are_large(frozen) else found + frozen


def lasting_buffers(chunk: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """All buffers of a model chunk but tables that a module makes by itself when it needs others.

    Those of YaRN follow from arguments alone, and plain attributes say what they are valid for
    (yarn_rotary_pos_embedding.py, get_cached_cos_sin): put back from before the first forward pass
    they would be used as if they were those that it has made, of another length and dtype.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, module in chunk.named_modules():
        own = vars(module)
        if own["_buffers"] and "max_seq_len_cached" not in own:
            for buffer_name, buffer in module.named_buffers(name, recurse=False):
                found.setdefault(id(buffer), (buffer_name, buffer))
    return list(found.values())


def large_frozen_weights(loop: ProtectedLoop) -> list[tuple[str, Tensor]]:
    """All frozen weights of the role where they have more than :data:`MOST_FROZEN_BYTES`."""
    frozen = _frozen_weights(loop)
    return frozen if _are_large(frozen) else []


def _frozen_weights(loop: ProtectedLoop) -> list[tuple[str, Tensor]]:
    return [
        (f"{index}.{name}", parameter)
        for index, chunk in enumerate(loop.model_chunks)
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    ]


def _are_large(frozen: list[tuple[str, Tensor]]) -> bool:
    return sum(parameter.nbytes for _, parameter in frozen) > MOST_FROZEN_BYTES


def _check_buffers(loop: ProtectedLoop, values: dict[str, Any]) -> None:
    """A buffer that only one of two loops has cannot be restored, or would be forgotten."""
    live = {f"buffer.{name}": tensor.shape for name, tensor in frozen_and_buffers(loop)}
    kept = {name: value.shape for name, value in values.items() if name.startswith("buffer.")}
    if live != kept:
        differing = sorted({name for name, _ in live.items() ^ kept.items()})
        raise ExtrasError(
            "buffers and frozen parameters differ from those that were captured:"
            f" {', '.join(differing[:5])}"
        )
