"""Inner updates on their way to peers that compute them as well: a description, then bytes by
chunk.

The description is made once for each update by the role whose update it is, and says which
parameters are in which chunk, in which group, and how each tensor of them looks. A chunk is one
flat tensor of bytes, on the device of the communication.
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

from deadpool_megatron.megatron import update_replay
from deadpool_megatron.megatron.optimizer import parameters_of, plain_values
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.template import dtype_name, dtype_of
from deadpool_megatron.wire.forms import Coded, Listed

_ALIGNMENT = 16
_GRADIENT = "gradient"


@dataclass(frozen=True)
class TensorMeta(Listed):
    """One tensor without its values: its type by name, and where its optimizer keeps it."""

    dtype: str
    shape: tuple[int, ...]
    is_on_host: bool

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return dtype_of(self.dtype).itemsize * math.prod(self.shape)

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        """Returns how a tensor looks."""
        return TensorMeta(
            dtype_name(tensor.dtype), tuple(tensor.shape), tensor.device.type == "cpu"
        )


@dataclass(frozen=True)
class Parameter(Listed):
    """One of a chunk. ``tensors``: under the empty name itself, then its state, by name, and its
    gradient where it has one; ``values``: state that is no tensor."""

    number: int
    group: int
    tensors: Mapping[str, TensorMeta]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Description(Coded):
    """Of one inner update: the plain values of its groups, and what is in each chunk."""

    groups: tuple[Mapping[str, Any], ...]
    chunks: tuple[tuple[Parameter, ...], ...]


def describe(inner: Any) -> bytes:
    """The update that ``inner`` is about to make; see :func:`described`."""
    groups, parameters = update_replay.group_numbers(inner), itertools.count()
    found: list[list[Parameter]] = []
    for chunk in update_replay.chunks(inner):
        found.append([])
        for parameter in chunk:
            tensors = dict(update_replay.all_tensors(inner, parameter))
            if parameter.grad is not None:
                tensors[_GRADIENT] = parameter.grad
            looks = {name: TensorMeta.of(tensor) for name, tensor in tensors.items()}
            number, values = next(parameters), plain_values(inner, parameter)
            found[-1].append(Parameter(number, groups[number], looks, values))
    whole = Description(update_replay.used_values(inner), tuple(map(tuple, found)))
    return codec.encode(whole.to_dict())


def described(payload: bytes) -> Description:
    """Inverse of :func:`describe`."""
    return Description.from_dict(codec.decode(payload))


def chunk_bytes(chunk: Sequence[Parameter]) -> int:
    """Length of the flat tensor of a chunk."""
    return sum(_padded(looks.nbytes) for one in chunk for looks in one.tensors.values())


def pack(
    inner: Any, chunk: Sequence[Parameter], before: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """The bytes of a chunk: gradients as they are, all else as ``before`` gives it."""
    flat = torch.zeros(chunk_bytes(chunk), dtype=torch.uint8, device=device)
    parameters = parameters_of(inner)
    for one, places in _places(chunk, flat):
        parameter = parameters[one.number]
        for name, tensor in update_replay.all_tensors(inner, parameter):
            places[name].copy_(_as_bytes(before(tensor)))
        if _GRADIENT in places:
            places[_GRADIENT].copy_(_as_bytes(parameter.grad))
    return flat


def unpack(chunk: Sequence[Parameter], flat: Tensor) -> list[update_replay.ParameterCopy]:
    """Inverse of :func:`pack`, on memory of its own, with the gradients in place."""
    copies = []
    for one, places in _places(chunk, flat):
        tensors = {}
        for name, looks in one.tensors.items():
            own = places[name].to("cpu" if looks.is_on_host else flat.device, copy=True)
            tensors[name] = own.view(dtype_of(looks.dtype)).view(looks.shape)
        gradient = tensors.pop(_GRADIENT, None)
        copy = update_replay.ParameterCopy(one.number, one.group, tensors, one.values)
        copy.parameter.grad = gradient
        copies.append(copy)
    return copies


def broadcast_bytes(
    payload: bytes, source: int, group: dist.ProcessGroup, device: torch.device
) -> bytes:
    """Return what role ``source`` gives as ``payload``, in all of the group. Collective."""
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
    """For each parameter where the bytes of its tensors lie, by name."""
    start = 0
    for one in chunk:
        places = {}
        for name, looks in one.tensors.items():
            places[name] = flat[start : start + looks.nbytes]
            start += _padded(looks.nbytes)
        yield one, places


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(tensor: Any) -> Tensor:
    flat: Tensor = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat
