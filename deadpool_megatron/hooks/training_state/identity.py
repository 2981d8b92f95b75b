"""What the bytes of a role mean: which parameters of which model, cut in which way.

Names are those of the whole model: however its layers are dealt out to stages, each has one name.
Said once, when a role is built or a model takes another role in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from deadpool_megatron.hooks.loop import ProtectedLoop, layer_number
from deadpool_megatron.hooks.training_state.optimizer import (
    UnsupportedOptimizer,
    inner_optimizers,
    model_parameters,
    state_tensors,
)
from deadpool_megatron.layout.meanings import in_words
from deadpool_megatron.state.packing import Part


def identify(loop: ProtectedLoop, parts: Sequence[Part]) -> None:
    """Have each shard part of a role say what it holds. Raises UnsupportedOptimizer for a parameter
    that is updated and has no name."""
    names = {id(parameter): name for name, parameter in loop.named_parameters()}
    for inner, part in zip(inner_optimizers(loop.optimizer), parts, strict=True):
        digest = hashlib.sha256(f"{part.meaning}|{in_words(loop.model_arguments())}".encode())
        for line in _contents(inner, names):
            digest.update(line.encode())
        part.meaning = digest.hexdigest()


def _contents(inner: Any, names: dict[int, str]) -> Iterator[str]:
    """A line for each parameter, in the order in which they are packed."""
    models = model_parameters(inner)
    for group in inner.optimizer.param_groups:
        for updated in group["params"]:
            parameter, start = models.get(id(updated), (updated, 0))
            name = names.get(id(parameter))
            if name is None:
                raise UnsupportedOptimizer(
                    f"a parameter of shape {tuple(parameter.shape)} is updated that"
                    " named_parameters() of the loop does not name"
                )
            kept = {"": updated, **state_tensors(inner, updated)}
            states = [f"{key}:{one.dtype}:{tuple(one.shape)}" for key, one in kept.items()]
            yield f"{name}|{tuple(parameter.shape)}|{_slice(parameter)}|{start}|{states}\n"


def _slice(parameter: Tensor) -> str:
    """Which of the slices of the whole model's parameter it is: experts are dealt out to ranks of
    their own. No data-parallel rank: replicas have equal slices."""
    if getattr(parameter, "allreduce", True):
        return _of(parallel_state.get_tensor_model_parallel_group())
    return " ".join(
        _of(group)
        for group in (
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
        )
    )


def _of(group: Any) -> str:
    return f"{group.rank()}/{group.size()}"


def role_meaning(loop: ProtectedLoop) -> str:
    """Which role of which model ``loop`` was built for."""
    facts = {**loop.model_arguments(), "virtual-stages": len(loop.model_chunks)}
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "expert-tensor": parallel_state.get_expert_tensor_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
    }
    facts |= {f"{name}-rank": _of(group) for name, group in groups.items() if group.size() > 1}
    facts["layers"] = "+".join(_layers(chunk) for chunk in loop.model_chunks)
    frozen = [
        f"{name}|{tuple(parameter.shape)}|{parameter.dtype}|{_slice(parameter)}"
        for name, parameter in loop.named_parameters()
        if not parameter.requires_grad
    ]
    if frozen:
        facts["frozen"] = hashlib.sha256("\n".join(frozen).encode()).hexdigest()[:16]
    return in_words({**facts, "stage": loop.stage_class()})


def _layers(chunk: torch.nn.Module) -> str:
    """The numbers that a chunk's layers have in the whole model, runs as first and last."""
    runs: list[list[int]] = []
    for name, module in chunk.named_modules():
        number = layer_number(name, module)
        if number is not None:
            if runs and runs[-1][-1] == number - 1:
                runs[-1][1:] = [number]
            else:
                runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs) or "none"
