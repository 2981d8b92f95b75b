"""The identity of a role's state: the meaning of its bytes, and a hash of the whole state.

The layout of a role's generations names the parameters of the model and their cut; the member sends
it to the vaults when a role is built or a model takes another role in place. Names are those of the
whole model: each layer has the same name in any distribution over stages. The hash covers all state
on which the training of a rank depends. By it a recovered run is compared with a run that had no
failure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from deadpool_megatron.layout.descriptions import meaning_of
from deadpool_megatron.layout.shard_map import Run
from deadpool_megatron.megatron import fp8, loop_extras, optimizer
from deadpool_megatron.megatron.loop import MegatronLoop, layer_number, trains_in_fp8
from deadpool_megatron.state.digest import Entry, generator_entries, short_digests, state_digest
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.state.parts import Part

_EXPERTS = ("expert_tensor_parallel", "expert_model_parallel")
_DENSE = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "data_parallel")


def identify(loop: MegatronLoop, parts: Sequence[Part]) -> None:
    """Set the meaning of each shard part of a role, and its runs. Raises UnsupportedState for an
    updated parameter without a name."""
    names = {id(parameter): name for name, parameter in loop.named_parameters()}
    model = meaning_of(loop.model_arguments())
    for inner, part in zip(optimizer.inner_optimizers(loop.optimizer), parts, strict=True):
        contents = [*_contents(inner, names)]
        text = "\n".join((part.meaning, model, *starmap(_description, contents)))
        part.meaning = hashlib.sha256(text.encode()).hexdigest()
        try:
            digest = hashlib.sha256(model.encode()).hexdigest()[:8]
            runs = [_run(part, f"{digest}|{key}", start, states) for key, start, states in contents]
        except (UnsupportedState, KeyError) as reason:
            part.indivisible = str(reason)
        else:
            part.runs, part.indivisible = tuple(run for run in runs if run.count), ""


def _run(part: Part, key: str, start: int, kept: dict[str, Tensor]) -> Run:
    """Return the places of a parameter's state. Raises UnsupportedState for state that has neither
    a value for each element nor a single value, such as scaling factors of blocks."""
    states, count = dict[str, tuple[int, int, int]](), kept[""].numel()
    for name, tensor in kept.items() if count else ():
        is_each = tensor.shape == kept[""].shape
        if "scale" in name or not (is_each or tensor.numel() == 1):
            raise UnsupportedState(f"{name} of {key} belongs to the shard as a whole")
        size = tensor.element_size()
        states[f"{name}:{tensor.dtype}"] = part.offset_of(tensor), size, size * is_each
    return Run(key, start, count, states)


def _description(key: str, start: int, kept: dict[str, Tensor]) -> str:
    states = [f"{name}:{tensor.dtype}:{tuple(tensor.shape)}" for name, tensor in kept.items()]
    return f"{key}|{start}|{states}"


def _contents(inner: Any, names: dict[int, str]) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
    """Yield the slice, the first element and the state of each parameter, in the order in which
    they are packed."""
    models = {
        id(updated): (model, start) for model, updated, start in optimizer.model_parameters(inner)
    }
    for updated in optimizer.parameters_of(inner):
        parameter, start = models.get(id(updated), (updated, 0))
        if id(parameter) not in names:
            shape = tuple(parameter.shape)
            raise UnsupportedState(f"named_parameters() has no parameter of shape {shape}")
        states = {"": updated, **optimizer.state_tensors(inner, updated)}
        yield _slice(names[id(parameter)], parameter), start, states


def _slice(name: str, parameter: Tensor) -> str:
    """Return a text for a parameter and its slice of the whole model; experts have groups of their
    own. The text has no data-parallel rank, since replicas have equal slices."""
    is_dense = getattr(parameter, "allreduce", True)
    ranks = [_rank(group) for group in (_DENSE[:1] if is_dense else _EXPERTS)]
    return f"{name}|{tuple(parameter.shape)}|{ranks}"


def _rank(name: str) -> str:
    """Return the role's rank in the Megatron group of this name."""
    group = getattr(parallel_state, f"get_{name}_group")()
    return f"{group.rank()}/{group.size()}"


def role_meaning(loop: MegatronLoop) -> str:
    """Return a text that names the role and the model for which ``loop`` was built."""
    facts = {**loop.model_arguments(), "virtual_stages": len(loop.model_chunks)}
    facts |= {f"{name}_rank": _rank(name) for name in (*_DENSE, *_EXPERTS)}
    facts["layers"] = "+".join(_layers(chunk) for chunk in loop.model_chunks)
    frozen = [
        f"{_slice(name, parameter)}|{parameter.dtype}"
        for name, parameter in loop.named_parameters()
        if not parameter.requires_grad
    ]
    facts["frozen"] = hashlib.sha256("\n".join(frozen).encode()).hexdigest()[:16] if frozen else 0
    return meaning_of({**facts, "stage": loop.stage_class()})


def _layers(chunk: torch.nn.Module) -> str:
    """Return the numbers that a chunk's layers have in the whole model: of each run of consecutive
    numbers, the first and the last."""
    runs: list[list[int]] = []
    for number in (layer_number(name, module) for name, module in chunk.named_modules()):
        if number is not None and runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        elif number is not None:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs) or "none"


def state_hash(loop: MegatronLoop) -> str:
    """Return the SHA-256, in hexadecimal, of this rank's whole training state. Purely local.

    Covers parameters and buffers of all chunks, each optimizer's master parameters, moments, steps
    and group values, loss scalers, FP8 scaling factors and histories, all random generators, the
    schedule and the counters.

    With ``--overlap-param-gather`` parameters are current only after a forced gather, which all
    ranks have to make before.
    """
    return state_digest(state_entries(loop))


def entry_digests(loop: MegatronLoop) -> dict[str, str]:
    """Return name -> short digest of each entry of this rank's state, except weights and optimizer
    state."""
    return short_digests(_small_entries(loop))


def state_entries(loop: MegatronLoop) -> Iterator[Entry]:
    yield from _large_entries(loop)
    yield from _small_entries(loop)


def _large_entries(loop: MegatronLoop) -> Iterator[Entry]:
    for number, chunk in enumerate(loop.model_chunks):
        for name, parameter in chunk.named_parameters():
            raw = optimizer.raw_tensors(parameter)
            for attribute, tensor in raw.items():
                yield f"parameter.{number}.{name}.{attribute}", tensor
            if not raw:
                yield f"parameter.{number}.{name}", parameter
        for name, buffer in loop_extras.lasting_buffers(chunk):
            yield f"buffer.{number}.{name}", buffer
    for name, tensor in fp8.named_tensors(loop.model_chunks) if trains_in_fp8(loop) else ():
        yield f"fp8.{name}", tensor
    for name, tensor in loop_extras.largest_logits(loop):
        yield f"logits.{name}", tensor
    for number, part in enumerate(optimizer.inner_optimizers(loop.optimizer)):
        yield from _optimizer_entries(f"optimizer.{number}", part)


def _small_entries(loop: MegatronLoop) -> Iterator[Entry]:
    for name, scaler in optimizer.loss_scalers(loop.optimizer).items():
        values = sorted(scaler.state_dict().items())
        yield name, repr([(key, float(value)) for key, value in values])
    yield from generator_entries()
    for name, state in sorted(loop_extras.tracked_random_states().items()):
        yield f"rng.{name}", state
    yield "scheduler", repr(loop.scheduler.num_steps)
    yield "counters", repr(sorted(loop.counters.items()))
    yield "log_sums", repr(sorted(loop.log_sums.items()))


def _optimizer_entries(name: str, part: Any) -> Iterator[Entry]:
    for group_number, group in enumerate(part.optimizer.param_groups):
        scalars = {k: v for k, v in group.items() if isinstance(v, int | float)}
        yield f"{name}.group.{group_number}", repr(sorted(scalars.items()))
        for key, value in sorted(group.items()):
            if isinstance(value, Tensor):
                yield f"{name}.group.{group_number}.{key}", value
        for number, parameter in enumerate(group["params"]):
            place = f"{name}.{group_number}.{number}"
            yield f"{place}.main", parameter
            for key, tensor in optimizer.state_tensors(part, parameter).items():
                yield f"{place}.{key}", tensor
            if numbers := optimizer.plain_values(part, parameter):
                yield f"{place}.numbers", repr(sorted(numbers.items()))
