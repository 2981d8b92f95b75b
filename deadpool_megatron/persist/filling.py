"""Marks in the values of a skeleton, and what a generation puts in their place.

A mark says where a value of the iteration is found: among the extras, or as one number in a shard
part. Programs put marks into the state that a save of theirs would write; everything without a mark
is the same in all iterations.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# (part, offset in bytes, dtype by name) -> the number there, a tensor without axes
ReadNumber = Callable[[str, int, str], Tensor]


class FillingError(Exception):
    """A generation lacks a value of the checkpoint; the message names it."""


class Mark(ABC):
    """Stands in a skeleton for a value that an iteration changes."""

    @abstractmethod
    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """The value in a generation. Raises FillingError; :data:`ABSENT` leaves the key out."""


ABSENT = object()


@dataclass(frozen=True)
class FromExtras(Mark):
    """``path``: name of an extra, then keys into it; ``plus`` is added to a number found there."""

    path: tuple[Any, ...]
    plus: int = 0

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        found: Any = extras
        for key in self.path:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError) as error:
                name = ".".join(map(str, self.path))
                raise FillingError(f"the extras do not hold {name}") from error
        if isinstance(found, list):
            return tuple(found)  # JSON has no tuples
        return found + self.plus if self.plus else found


@dataclass(frozen=True)
class HexFloats(Mark):
    """An extra that maps names to floating-point numbers, kept in hexadecimal."""

    name: str

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        kept = FromExtras((self.name,)).value(extras, read)
        return {key: float.fromhex(number) for key, number in kept.items()}


@dataclass(frozen=True)
class StepNumber(Mark):
    """Adam's count of steps, from a shard part; as Megatron writes it: a ``number``, or a tensor
    that is left out while it is zero (optimizer.py:845).
    """

    part: str
    offset_bytes: int
    dtype: str
    as_number: bool

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        found = read(self.part, self.offset_bytes, self.dtype).clone()
        if self.as_number:
            return found.item()
        return found if found else ABSENT


@dataclass(frozen=True)
class RandomStates(Mark):
    """The random states of Python, numpy, torch, the device, and Megatron's own, as Megatron's
    checkpoints name them. Without a device its state is that of the CPU (platform/stand_ins.py).
    """

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        version, words, gauss = extras["random.python"]
        kind, position, has_gauss, cached = extras["random.numpy"]
        keys = np.frombuffer(extras["random.numpy.keys"], dtype="<u4").astype(np.uint32)
        prefix = "random.tracker."
        return {
            "random_rng_state": (version, tuple(words), gauss),
            "np_rng_state": (kind, keys, position, has_gauss, cached),
            "torch_rng_state": extras["random.torch"],
            "cuda_rng_state": extras.get("random.cuda", extras["random.torch"]),
            "rng_tracker_states": {
                name.removeprefix(prefix): state
                for name, state in extras.items()
                if name.startswith(prefix)
            },
        }


@dataclass(frozen=True)
class Joined(Mark):
    """One dict of several, which may hold marks or be some."""

    parts: tuple[Any, ...]

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        whole: dict[str, Any] = {}
        for part in self.parts:
            whole.update(fill(part, extras, read))
        return whole


@dataclass(frozen=True)
class Attributes(Mark):
    """An object some of whose attributes an iteration changes; the others are as they were."""

    whole: Any
    marks: Mapping[str, Mark]

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        made = copy.copy(self.whole)
        for name, mark in self.marks.items():
            setattr(made, name, mark.value(extras, read))
        return made


def has_marks(value: Any) -> bool:
    """Return whether :func:`fill` would put something in."""
    if isinstance(value, dict):
        return any(map(has_marks, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_marks, value))
    return isinstance(value, Mark)


def fill(value: Any, extras: Mapping[str, Any], read: ReadNumber) -> Any:
    """A copy of ``value`` with the values of a generation in place of marks. Raises FillingError.

    Goes into dicts, lists and tuples; anything else is one value.
    """
    if isinstance(value, Mark):
        return value.value(extras, read)
    if isinstance(value, dict):
        filled = {key: fill(one, extras, read) for key, one in value.items()}
        return {key: one for key, one in filled.items() if one is not ABSENT}
    if isinstance(value, list):
        return [fill(one, extras, read) for one in value]
    if type(value) is tuple:
        return tuple(fill(one, extras, read) for one in value)
    return value


def dtype_of(name: str) -> torch.dtype:
    """``bfloat16`` -> torch.bfloat16. Raises FillingError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FillingError(f"torch has no dtype {name}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Inverse of :func:`dtype_of`."""
    return str(dtype).removeprefix("torch.")
