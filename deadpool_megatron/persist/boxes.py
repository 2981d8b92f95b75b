"""Runs of a flattened tensor as boxes: what a checkpoint of torch can name, which knows no runs.

A distributed optimizer cuts the flat buffer of all parameters anywhere. What one role has of a
parameter is a run of its elements in memory order; a checkpoint is made of boxes. A run of a tensor
with n axes is at most 2n - 1 boxes, each of which is a run itself. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """``start``: its first element in the flattened tensor; its elements follow in memory order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a tensor of this shape, in order. Nothing for an empty
    run; raises ValueError for one that leaves the tensor.
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
