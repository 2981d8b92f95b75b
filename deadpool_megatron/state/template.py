"""State templates: the recipe of one role's part of a checkpoint, made once and used many times.

A state template names every box of every tensor that the role writes and where its bytes lie in a
generation, and holds the other values of the checkpoint with marks in place of those that an
iteration changes. It is a file of its node, readable by its user alone. The run directory has a
copy for a run that exports its state at its end, as the node may be lost then.

A mark is the place of a value of the iteration: among the extras, or as one number in a shard part.
Programs put marks into the state that they would save; everything without a mark is the same in all
iterations.

A distributed optimizer cuts the flat buffer of all parameters anywhere. A role has a run of a
parameter's elements in memory order, but a checkpoint of torch is made of boxes. A run of a tensor
with n axes is at most 2n - 1 boxes, each of which is a run itself.
"""

from __future__ import annotations

import copy
import io
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deadpool_megatron import ownership
from deadpool_megatron.file_systems import write_text
from deadpool_megatron.state.extras import library_states

# (part, offset in bytes, dtype by name) -> the number there, a tensor without axes
ReadNumber = Callable[[str, int, str], Tensor]

_OWN = 0o600
# In place of a part's name: bytes without meaning, such as the padding between parameters.
ZEROS = ""
# In place of a part's name: the file of weights that no iteration changes.
FROZEN = "frozen"


class TemplateError(Exception):
    """No usable state template, or no value for a mark; the message is a reason in one line."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of the checkpoint.

    Its bytes are contiguous, from ``offset_bytes`` on in ``part``: a shard part, or the name of a
    tensor among the extras, which have its dtype. ``stored``: dtype of the bytes, which are cast to
    ``dtype`` where they differ (dtypes by name, as ``bfloat16``).
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    part: str
    offset_bytes: int
    stored: str
    is_extra: bool = False


@dataclass(frozen=True)
class StateTemplate:
    """The recipe of one role's part of a checkpoint.

    ``objects``: key in the checkpoint -> value with marks; ``common``: values that only role 0
    writes, None elsewhere. ``refusal``: the reason why there can be no checkpoint; then nothing
    else counts.
    """

    role: int
    layout_hash: str
    pieces: tuple[Piece, ...] = ()
    objects: dict[str, Any] = field(default_factory=dict)
    common: Any = None
    refusal: str = ""


def template_path(directory: Path, role: int) -> Path:
    """Return the file in which the member with ``role`` on this node leaves its state template."""
    return directory / f"skeleton-{role}.pt"


def write_template(directory: Path, template: StateTemplate) -> None:
    """Replace the role's state template atomically; other users cannot read it."""
    content = io.BytesIO()
    torch.save(template, content)
    write_text(template_path(directory, template.role), content.getvalue(), mode=_OWN)


def share_template(directory: Path, role: int, shared: Path) -> None:
    """Copy the file of :func:`write_template` to a directory of all nodes. Raises OSError.

    Safe in a thread of its own: the file system of all nodes may be slow, or away for a while.
    """
    content = template_path(directory, role).read_bytes()
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(template_path(shared, role), content, mode=_OWN)


def read_template(directory: Path, role: int, layout_hash: str) -> StateTemplate:
    """Read the role's state template.

    Raises TemplateError when it is missing, refused, or of another layout. Only a file that no
    other user can have written is read, as it holds Python objects.
    """
    path = template_path(directory, role)
    try:
        with os.fdopen(ownership.open_own(path, secret=True), "rb") as file:
            content = file.read()
    except ownership.OwnershipError as error:
        raise TemplateError(str(error)) from error
    except OSError as error:
        raise TemplateError(f"role {role} left no state template: {error.strerror}") from error
    try:
        template = torch.load(io.BytesIO(content), weights_only=False)
    except Exception as error:  # a parser may raise anything for damaged bytes
        raise TemplateError(f"{path} is damaged: {type(error).__name__}") from error
    if not isinstance(template, StateTemplate) or template.role != role:
        raise TemplateError(f"{path} is not the state template of role {role}")
    if template.refusal:
        raise TemplateError(template.refusal)
    if template.layout_hash != layout_hash:
        raise TemplateError(
            f"the state template of role {role} is of another layout than its state"
        )
    return template


@dataclass(frozen=True)
class Box:
    """A run of a tensor that is a box. ``start``: its first element in the flattened tensor; the
    others follow in memory order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements ``start`` to ``stop`` of a tensor of this shape, in order.

    Nothing for an empty run; raises ValueError for a run that leaves the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} of a tensor of shape {tuple(shape)}")
    if start < stop:
        yield from _boxes(tuple(shape), start, stop, 0)


def _boxes(shape: tuple[int, ...], start: int, stop: int, before: int) -> Iterator[Box]:
    if not shape:
        yield Box((), (), before)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start, stop) != (first * row, (first + 1) * row):
        for box in _boxes(shape[1:], start - first * row, stop - first * row, before + first * row):
            yield Box((first, *box.offsets), (1, *box.sizes), box.start)
        return
    whole_from, whole_to = -(-start // row), stop // row
    if start < whole_from * row:
        yield from _boxes(shape, start, whole_from * row, before)
    if whole_from < whole_to:
        offsets = (whole_from, *([0] * (len(shape) - 1)))
        yield Box(offsets, (whole_to - whole_from, *shape[1:]), before + whole_from * row)
    if whole_to * row < stop:
        yield from _boxes(shape, max(start, whole_to * row), stop, before)


class Mark(ABC):
    """A placeholder in a state template for a value that an iteration changes."""

    @abstractmethod
    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """Return the value in a generation. Raises TemplateError; :data:`ABSENT` leaves the key
        out."""


ABSENT = object()


@dataclass(frozen=True)
class FromExtras(Mark):
    """A value of the extras. ``path``: name of an extra, then keys into it; ``plus`` is added to a
    number found there."""

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
                raise TemplateError(f"the extras do not hold {name}") from error
        if isinstance(found, list):
            return tuple(found)  # JSON has no tuples
        return found + self.plus if self.plus else found


@dataclass(frozen=True)
class StepNumber(Mark):
    """Adam's count of steps from a shard part, as Megatron writes it: a number, or a tensor that is
    left out while it is zero (optimizer.py:845).
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
    checkpoints name them. Without a device its state is that of the CPU (megatron/stand_ins.py).
    """

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        python, numpy = library_states(extras)
        return {
            "random_rng_state": python,
            "np_rng_state": numpy,
            "torch_rng_state": extras["random.torch"],
            "cuda_rng_state": extras.get("random.cuda", extras["random.torch"]),
            "rng_tracker_states": extras["random.tracker"],
        }


@dataclass(frozen=True)
class Attributes(Mark):
    """An object with attributes that an iteration changes, and others that it does not."""

    whole: Any
    marks: Mapping[str, Mark]

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        made = copy.copy(self.whole)
        for name, mark in self.marks.items():
            setattr(made, name, mark.value(extras, read))
        return made


def has_marks(value: Any) -> bool:
    """Return whether :func:`fill` would replace anything."""
    if isinstance(value, dict):
        return any(map(has_marks, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_marks, value))
    return isinstance(value, Mark)


def fill(value: Any, extras: Mapping[str, Any], read: ReadNumber) -> Any:
    """Return a copy of ``value`` with marks replaced by a generation's values. Raises
    TemplateError.

    Goes into dicts, lists and tuples; anything else is one value.
    """
    if isinstance(value, Mark):
        return value.value(extras, read)
    if isinstance(value, dict):
        filled = {key: fill(item, extras, read) for key, item in value.items()}
        return {key: item for key, item in filled.items() if item is not ABSENT}
    if isinstance(value, list):
        return [fill(item, extras, read) for item in value]
    if type(value) is tuple:
        return tuple(fill(item, extras, read) for item in value)
    return value


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name, as ``bfloat16``. Raises TemplateError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TemplateError(f"torch has no dtype {name}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Inverse of :func:`dtype_of`."""
    return str(dtype).removeprefix("torch.")
