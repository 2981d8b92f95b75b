"""State templates: the recipe of a role's part of a checkpoint, made once and used many times.

A state template lists each box of each tensor that the role writes, with the place of its bytes in
a generation. It has the other values of the checkpoint, too, with marks instead of those that an
iteration changes. It is a file on its node that only its user can read. The run directory has a
copy for a run that exports its state at its end, as the node may be lost by then.

A mark has the place of a value of the iteration: among the extras, or as a number in a shard part.
A framework puts marks into the state that it would save; values without a mark are the same in all
iterations.

A distributed optimizer cuts the flat buffer of all parameters at any element. So a role has a run
of a parameter's elements in memory order, but a checkpoint of torch consists of boxes. A run of a
tensor with n axes is at most 2n - 1 boxes, each of which is a run itself.
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

_FILE_MODE = 0o600
# A part name for bytes without meaning, such as the padding between parameters.
ZEROS = ""
# A part name for the file of weights that no iteration changes.
FROZEN = "frozen"


class TemplateError(Exception):
    """There is no usable state template, or no value for a mark; the message is the reason."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of the checkpoint.

    Its bytes are contiguous, from ``offset_bytes`` on in ``part``: a shard part, or with
    ``is_extra`` a tensor among the extras. ``dtype``: dtype in the checkpoint; ``stored``: dtype of
    the bytes, which are cast if it is another (dtypes by name, as ``bfloat16``).
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
    """The recipe of a role's part of a checkpoint.

    ``objects``: key in the checkpoint -> value with marks; ``common``: the values that only role 0
    writes, None for other roles. ``refusal``: the reason why there can be no checkpoint; the other
    fields have no meaning then.
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
    write_text(template_path(directory, template.role), content.getvalue(), mode=_FILE_MODE)


def share_template(directory: Path, role: int, shared: Path) -> None:
    """Copy the file of :func:`write_template` to a directory that all nodes share. Raises OSError.

    Another thread may call this, as the shared file system may be slow, or not available for a
    while.
    """
    content = template_path(directory, role).read_bytes()
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(template_path(shared, role), content, mode=_FILE_MODE)


def read_template(directory: Path, role: int, layout_hash: str) -> StateTemplate:
    """Read the role's state template.

    Raises TemplateError if it is missing, a refusal, or of another layout. The file contains Python
    objects, so a file that another user could have written is not read.
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
    except Exception as error:  # damaged bytes may raise any error in a parser
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
    """A box of a tensor whose elements are contiguous in memory. ``start``: the index of its first
    element in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements ``start`` to ``stop`` of a tensor of this shape, in order.

    Yields nothing for an empty run. Raises ValueError for a run that leaves the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} of a tensor of shape {tuple(shape)}")
    if start < stop:
        yield from _boxes(tuple(shape), start, stop, 0)


def _boxes(shape: tuple[int, ...], start: int, stop: int, before: int) -> Iterator[Box]:
    """Cut a run into the rest of a row of the first axis, whole rows, and the begin of a row. The
    whole rows are a box; a part of a row is cut along the next axis. ``before``: the number of
    elements before this tensor in the tensor of which it is a row."""
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
        """Return the value in a generation, or :data:`ABSENT` to leave the key out. Raises
        TemplateError."""


ABSENT = object()


@dataclass(frozen=True)
class FromExtras(Mark):
    """A value of the extras. ``path``: name of an extra, then keys into it; ``plus`` is added to a
    number found there."""

    path: tuple[Any, ...]
    plus: int = 0

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        value: Any = extras
        for key in self.path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError) as error:
                name = ".".join(map(str, self.path))
                raise TemplateError(f"the extras do not hold {name}") from error
        if isinstance(value, list):
            return tuple(value)  # JSON has no tuples
        return value + self.plus if self.plus else value


@dataclass(frozen=True)
class StepNumber(Mark):
    """Adam's count of steps from a shard part, as Megatron writes it (optimizer.py:845). With
    ``as_number`` the value is a number, else a tensor, which is left out while it is zero.
    """

    part: str
    offset_bytes: int
    dtype: str
    as_number: bool

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        count = read(self.part, self.offset_bytes, self.dtype).clone()
        if self.as_number:
            return count.item()
        return count if count else ABSENT


@dataclass(frozen=True)
class RandomStates(Mark):
    """The random states of Python, numpy, torch, the device, and Megatron's own, under the names in
    Megatron's checkpoints. Without a device, the state of the CPU stands for that of the device
    (megatron/stand_ins.py).
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
    """An object of which an iteration changes some attributes. ``whole``: the object; ``marks``: a
    mark for each such attribute."""

    whole: Any
    marks: Mapping[str, Mark]

    def value(self, extras: Mapping[str, Any], read: ReadNumber) -> Any:
        """See :class:`Mark`."""
        result = copy.copy(self.whole)
        for name, mark in self.marks.items():
            setattr(result, name, mark.value(extras, read))
        return result


def has_marks(value: Any) -> bool:
    """Return whether ``value`` contains marks, which :func:`fill` would replace."""
    if isinstance(value, dict):
        return any(map(has_marks, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_marks, value))
    return isinstance(value, Mark)


def fill(value: Any, extras: Mapping[str, Any], read: ReadNumber) -> Any:
    """Return a copy of ``value`` with marks replaced by a generation's values. Raises
    TemplateError.

    Marks are replaced in dicts, lists and tuples; other objects are not searched.
    """
    if isinstance(value, Mark):
        return value.value(extras, read)
    if isinstance(value, dict):
        items = {key: fill(item, extras, read) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not ABSENT}
    if isinstance(value, list):
        return [fill(item, extras, read) for item in value]
    if type(value) is tuple:
        return tuple(fill(item, extras, read) for item in value)
    return value


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name like ``bfloat16``. Raises TemplateError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TemplateError(f"torch has no dtype {name}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, the inverse of :func:`dtype_of`."""
    return str(dtype).removeprefix("torch.")
