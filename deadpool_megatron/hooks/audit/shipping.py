"""Inner updates on their way to peers that compute them as well: a description, then bytes by
chunk.

The description is made once for each update by the role whose update it is, and says which
parameters are in which chunk, in which group, and how each tensor of them looks. A chunk is one
flat tensor of bytes, on the device of the communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.hooks.capture.update_replay import (
    ParameterCopy,
    all_tensors,
    chunks,
    group_numbers,
    parameters_of,
    plain_values,
    used_values,
)

_ALIGNMENT = 16
_GRADIENT = "gradient"


@dataclass(frozen=True)
class Looks:
    """One tensor without its values. ``is_on_host``: where its optimizer keeps it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_on_host: bool

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @staticmethod
    def of(tensor: Tensor) -> Looks:
        """Returns how a tensor looks."""
        return Looks(tensor.dtype, tuple(tensor.shape), tensor.device.type == "cpu")

    def to_json(self) -> list[Any]:
        """JSON form."""
        return [str(self.dtype).removeprefix("torch."), list(self.shape), self.is_on_host]

    @staticmethod
    def from_json(values: list[Any]) -> Looks:
        """Inverse of :meth:`to_json`. Raises ValueError for a type that torch does not know."""
        dtype = getattr(torch, str(values[0]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{values[0]} is no type of tensors")
        return Looks(dtype, tuple(values[1]), bool(values[2]))


@dataclass(frozen=True)
class Parameter:
    """One of a chunk. ``tensors``: under the empty name itself, then its state, by name, and its
    gradient where it has one; ``values``: state that is no tensor."""

    number: int
    group: int
    tensors: Mapping[str, Looks]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Description:
    """Of one inner update: the plain values of its groups, and what is in each chunk."""

    groups: list[dict[str, Any]]
    chunks: list[list[Parameter]]

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "groups": self.groups,
            "chunks": [
                [
                    [
                        one.number,
                        one.group,
                        {name: looks.to_json() for name, looks in one.tensors.items()},
                        dict(one.values),
                    ]
                    for one in chunk
                ]
                for chunk in self.chunks
            ],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Description:
        """Inverse of :meth:`to_json`."""
        found = [
            [
                Parameter(
                    number,
                    group,
                    {name: Looks.from_json(looks) for name, looks in tensors.items()},
                    plain,
                )
                for number, group, tensors, plain in chunk
            ]
            for chunk in values["chunks"]
        ]
        return Description(list(values["groups"]), found)


def describe(inner: Any) -> Description:
    """The update that ``inner`` is about to make."""
    groups, number = group_numbers(inner), 0
    found: list[list[Parameter]] = []
    for chunk in chunks(inner):
        described = []
        for parameter in chunk:
            looks = {name: Looks.of(tensor) for name, tensor in all_tensors(inner, parameter)}
            if parameter.grad is not None:
                looks[_GRADIENT] = Looks.of(parameter.grad)
            values = plain_values(inner, parameter)
            described.append(Parameter(number, groups[number], looks, values))
            number += 1
        found.append(described)
    return Description(used_values(inner), found)


def chunk_bytes(chunk: list[Parameter]) -> int:
    """Length of the flat tensor of a chunk."""
    return sum(_padded(looks.nbytes) for one in chunk for looks in one.tensors.values())


def pack(
    inner: Any, chunk: list[Parameter], before: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """The bytes of a chunk: gradients as they are, all else as ``before`` gives it."""
    flat = torch.zeros(chunk_bytes(chunk), dtype=torch.uint8, device=device)
    parameters = parameters_of(inner)
    for one, places in _places(chunk, flat):
        parameter = parameters[one.number]
        for name, tensor in all_tensors(inner, parameter):
            places[name].copy_(_as_bytes(before(tensor)))
        if _GRADIENT in places:
            places[_GRADIENT].copy_(_as_bytes(parameter.grad))
    return flat


def unpack(chunk: list[Parameter], flat: Tensor) -> list[ParameterCopy]:
    """Inverse of :func:`pack`, on memory of its own, with the gradients in place."""
    copies = []
    for one, places in _places(chunk, flat):
        tensors = {}
        for name, looks in one.tensors.items():
            own = places[name].to("cpu" if looks.is_on_host else flat.device, copy=True)
            tensors[name] = own.view(looks.dtype).view(looks.shape)
        gradient = tensors.pop(_GRADIENT, None)
        copy = ParameterCopy(one.number, one.group, tensors, one.values)
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


def _places(chunk: list[Parameter], flat: Tensor) -> Iterator[tuple[Parameter, dict[str, Tensor]]]:
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
