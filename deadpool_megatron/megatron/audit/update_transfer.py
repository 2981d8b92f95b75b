"""Transfer of inner updates to peers that compute them as well: a description, then bytes by chunk.

The role that makes an update describes the update once: the parameters of each chunk, the group of
each parameter, and the type, shape and device of its tensors. A chunk is a flat tensor of bytes, on
the device of the communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.megatron.audit import update_replay
from deadpool_megatron.megatron.optimizer import parameters_of, plain_values
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.parts import aligned, flat_bytes
from deadpool_megatron.state.template import dtype_name, dtype_of
from deadpool_megatron.wire.forms import Coded, Listed

_GRADIENT = "gradient"


@dataclass(frozen=True)
class TensorMeta(Listed):
    """A tensor without its values. ``dtype``: its type by name; ``is_on_host``: whether its
    optimizer keeps it on the host."""

    dtype: str
    shape: tuple[int, ...]
    is_on_host: bool

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the values."""
        return dtype_of(self.dtype).itemsize * math.prod(self.shape)

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        """Return the metadata of a tensor."""
        return TensorMeta(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.is_cpu)


@dataclass(frozen=True)
class Parameter(Listed):
    """A parameter of a chunk. ``tensors``: the parameter under the empty name, then its state by
    name, and its gradient if it has any; ``values``: state that is no tensor."""

    number: int
    group: int
    tensors: Mapping[str, TensorMeta]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Description(Coded):
    """An inner update: the plain values of its groups, and the parameters of each chunk."""

    groups: tuple[Mapping[str, Any], ...]
    chunks: tuple[tuple[Parameter, ...], ...]


def describe(inner: Any) -> bytes:
    """Describe the update that ``inner`` is about to make; see :func:`parse`."""
    groups, parameters = update_replay.group_numbers(inner), itertools.count()
    found: list[list[Parameter]] = []
    for chunk in update_replay.chunks(inner):
        found.append([])
        for parameter in chunk:
            tensors = dict(update_replay.all_tensors(inner, parameter))
            if parameter.grad is not None:
                tensors[_GRADIENT] = parameter.grad
            metas = {name: TensorMeta.of(tensor) for name, tensor in tensors.items()}
            number, values = next(parameters), plain_values(inner, parameter)
            found[-1].append(Parameter(number, groups[number], metas, values))
    whole = Description(update_replay.plain_group_values(inner), tuple(map(tuple, found)))
    return codec.encode(whole.to_dict())


def parse(payload: bytes) -> Description:
    """Inverse of :func:`describe`."""
    return Description.from_dict(codec.decode(payload))


def chunk_bytes(chunk: Sequence[Parameter]) -> int:
    """Return the length of the flat tensor of a chunk."""
    return sum(aligned(meta.nbytes) for each in chunk for meta in each.tensors.values())


def pack(
    inner: Any, chunk: Sequence[Parameter], before: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """Return the bytes of a chunk: the live gradients, and ``before(tensor)`` for all other
    tensors."""
    flat = torch.zeros(chunk_bytes(chunk), dtype=torch.uint8, device=device)
    parameters = parameters_of(inner)
    for each, places in _places(chunk, flat):
        parameter = parameters[each.number]
        for name, tensor in update_replay.all_tensors(inner, parameter):
            places[name].copy_(flat_bytes(before(tensor)))
        if parameter.grad is not None:
            places[_GRADIENT].copy_(flat_bytes(parameter.grad))
    return flat


def unpack(chunk: Sequence[Parameter], flat: Tensor) -> list[update_replay.ParameterCopy]:
    """Return copies of the parameters in a chunk of :func:`pack`, with their gradients set."""
    copies = []
    for each, places in _places(chunk, flat):
        tensors = {}
        for name, meta in each.tensors.items():
            own = places[name].to("cpu" if meta.is_on_host else flat.device, copy=True)
            tensors[name] = own.view(dtype_of(meta.dtype)).view(meta.shape)
        gradient = tensors.pop(_GRADIENT, None)
        copy = update_replay.ParameterCopy(each.number, each.group, tensors, each.values)
        copy.parameter.grad = gradient
        copies.append(copy)
    return copies


def broadcast_bytes(
    payload: bytes, source: int, group: dist.ProcessGroup, device: torch.device
) -> bytes:
    """Return the ``payload`` of role ``source`` on all ranks of the group. Collective."""
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=source, group=group)
    flat = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if payload:
        flat.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(flat, src=source, group=group)
    return flat.cpu().numpy().tobytes()


def _places(
    chunk: Sequence[Parameter], flat: Tensor
) -> Iterator[tuple[Parameter, dict[str, Tensor]]]:
    """Yield each parameter with the places of its tensors in ``flat``, by name."""
    start = 0
    for each in chunk:
        places = {}
        for name, meta in each.tensors.items():
            places[name] = flat[start : start + meta.nbytes]
            start += aligned(meta.nbytes)
        yield each, places
