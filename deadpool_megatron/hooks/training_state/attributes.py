"""State that Megatron keeps in plain attributes of its objects.

* ``current_max_attn_logits`` of attention (transformer_engine.py, ``TEDotProductAttention``): an
  evaluation adds to it, and the next step logs it (optimizer/qk_clip.py)
* the counts and largest values by which the rerun machine finds a spike (rerun_state_machine.py,
  ``is_unexpectedly_large``)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import rerun_state_machine
from torch import Tensor

from deadpool_megatron.hooks.loop import ProtectedLoop

_LOGITS = "current_max_attn_logits"


def capture(loop: ProtectedLoop) -> dict[str, Any]:
    """A part of the extras."""
    values = capture_passing(loop)
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None:
        values["rerun"] = {
            "counts": dict(machine.large_value_counts),
            "largest": {name: float(one).hex() for name, one in machine.max_values.items()},
            "first_is_over": bool(machine.first_iteration_complete),
        }
    return values


def capture_passing(loop: ProtectedLoop) -> dict[str, Any]:
    """What a pass changes of it; an audit has the rerun machine not look."""
    return {f"logits.{name}": tensor for name, tensor in largest_logits(loop)}


def restore(loop: ProtectedLoop, values: dict[str, Any]) -> None:
    """Inverse of :func:`capture`, for extras that know of these as well as for older ones."""
    for name, module, device in _attention(loop):
        found = values.get(f"logits.{name}")
        setattr(module, _LOGITS, None if found is None else found.to(device))
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None and (seen := values.get("rerun")) is not None:
        machine.large_value_counts = dict(seen["counts"])
        machine.max_values = {name: float.fromhex(one) for name, one in seen["largest"].items()}
        machine.first_iteration_complete = seen["first_is_over"]


def largest_logits(loop: ProtectedLoop) -> Iterator[tuple[str, Tensor]]:
    """Of each attention that has seen any since the last clip: a number for each of its heads."""
    for name, module, _ in _attention(loop):
        if (found := vars(module)[_LOGITS]) is not None:
            yield name, found.detach()  # some versions keep the graph of every batch behind it


def _attention(loop: ProtectedLoop) -> Iterator[tuple[str, torch.nn.Module, torch.device]]:
    for index, chunk in enumerate(loop.model_chunks):
        device = None
        for name, module in chunk.named_modules():
            if _LOGITS in vars(module):  # hasattr() takes a microsecond where it is not
                device = device or next(chunk.parameters()).device
                yield f"{index}.{name}", module, device
