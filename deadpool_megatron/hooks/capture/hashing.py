"""One number for everything a rank's training depends on: the oracle of exactness."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from deadpool_megatron.hooks.capture import fp8
from deadpool_megatron.hooks.capture.extras import (
    largest_logits,
    lasting_buffers,
    tracked_random_states,
)
from deadpool_megatron.hooks.capture.optimizer import (
    inner_optimizers,
    loss_scalers,
    raw_tensors,
    state_tensors,
)
from deadpool_megatron.hooks.loop import ProtectedLoop

_Entry = tuple[str, torch.Tensor | str]


def state_hash(loop: ProtectedLoop) -> str:
    """SHA-256, in hexadecimal, of this rank's whole training state. Purely local.

    Covers parameters and buffers of all chunks, each optimizer's master parameters, moments, steps
    and group values, loss scalers, FP8 scaling factors and histories, all random generators, the
    schedule and the counters.

    With ``--overlap-param-gather`` parameters are current only after a forced gather; do one on
    all ranks first.
    """
    digest = hashlib.sha256()
    for name, value in _entries(loop):
        _add(digest, name, value)
    return digest.hexdigest()


def state_digests(loop: ProtectedLoop) -> dict[str, str]:
    """The same state piece by piece, name -> SHA-256: shows where two states differ."""
    digests = {}
    for name, value in _entries(loop):
        digest = hashlib.sha256()
        _add(digest, name, value)
        digests[name] = digest.hexdigest()
    return digests


def _entries(loop: ProtectedLoop) -> Iterator[_Entry]:
    for number, chunk in enumerate(loop.model_chunks):
        for name, parameter in chunk.named_parameters():
            raw = raw_tensors(parameter)
            for attribute, tensor in raw.items():
                yield f"parameter.{number}.{name}.{attribute}", tensor
            if not raw:
                yield f"parameter.{number}.{name}", parameter
        for name, buffer in lasting_buffers(chunk):
            yield f"buffer.{number}.{name}", buffer
    for name, tensor in fp8.named_tensors(loop.model_chunks):
        yield f"fp8.{name}", tensor
    for name, tensor in largest_logits(loop):
        yield f"logits.{name}", tensor
    for number, part in enumerate(inner_optimizers(loop.optimizer)):
        yield from _optimizer_entries(f"optimizer.{number}", part)
    for name, scaler in loss_scalers(loop.optimizer).items():
        values = sorted(scaler.state_dict().items())
        yield name, repr([(key, float(value)) for key, value in values])
    yield from _generator_entries()
    yield "scheduler", repr(loop.scheduler.num_steps)
    yield "counters", repr(sorted(loop.counters.items()))
    yield "log_sums", repr(sorted(loop.log_sums.items()))


def _optimizer_entries(name: str, part: Any) -> Iterator[_Entry]:
    for group_number, group in enumerate(part.optimizer.param_groups):
        scalars = {k: v for k, v in group.items() if isinstance(v, int | float)}
        yield f"{name}.group.{group_number}", repr(sorted(scalars.items()))
        for key, value in sorted(group.items()):
            if isinstance(value, torch.Tensor):
                yield f"{name}.group.{group_number}.{key}", value
        for number, parameter in enumerate(group["params"]):
            place = f"{name}.{group_number}.{number}"
            yield f"{place}.main", parameter
            for key, tensor in state_tensors(part, parameter).items():
                yield f"{place}.{key}", tensor


def _generator_entries() -> Iterator[_Entry]:
    kind, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    yield "rng.python", repr(random.getstate())
    yield "rng.numpy", f"{kind}{np.asarray(keys).tobytes().hex()}{position}{has_normal}{normal}"
    yield "rng.torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "rng.cuda", torch.cuda.get_rng_state()
    for name, state in sorted(tracked_random_states().items()):
        yield f"rng.{name}", state


def _add(digest: hashlib._Hash, name: str, value: torch.Tensor | str) -> None:
    digest.update(name.encode())
    if isinstance(value, str):
        digest.update(value.encode())
        return
    digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
    data = value.detach().cpu().contiguous().reshape(-1)
    digest.update(data.view(torch.uint8).numpy().data)
