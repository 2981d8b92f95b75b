"""Shard maps, and how a part is cut from the parts of another number of model replicas. Pure.

A shard map lists the elements of parameters that a role has, and where their state is in its parts.
A key names a parameter and its slice of the whole model, without the data-parallel rank, so equal
keys mean the same numbers at every size. Padding and the borders of buckets differ between sizes,
so only keys and element numbers decide which bytes are copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from deadpool_megatron.wire.forms import Coded, Listed

# Start of each tensor in a part. 64 is a cache line and enough for every dtype and vector width.
ALIGNMENT_BYTES = 64
# A role, and the name of a shard part of it.
RolePart = tuple[int, str]


class CannotReshard(ValueError):
    """A part cannot be cut from the parts at hand; the message has the reason."""


@dataclass(frozen=True)
class Run(Listed):
    """Consecutive elements of a parameter, and the places of their state in a part.

    ``key``: the parameter's slice of the model. ``start``, ``count``: elements. ``states``: name
    and type of a state -> offset of its first value in the part, bytes of a value, and bytes from
    one element's value to the next: 0 for a value that all elements share.
    """

    key: str
    start: int
    count: int
    states: Mapping[str, tuple[int, int, int]]

    @property
    def kinds(self) -> dict[str, tuple[int, int]]:
        """Return the last two numbers of each state: bytes of a value, and step."""
        return {name: (size, step) for name, (_, size, step) in self.states.items()}


@dataclass(frozen=True)
class ShardMap(Coded):
    """The runs of each shard part of a role. ``nbytes``: the size of its JSON form, even if the
    runs are left out; 0 for a role whose parts cannot be cut."""

    nbytes: int = 0
    runs: Mapping[str, tuple[Run, ...]] = field(default_factory=dict)

    @staticmethod
    def of(runs: Mapping[str, tuple[Run, ...]]) -> ShardMap:
        """Return the map with these runs."""
        unsized = ShardMap(runs=runs)
        return replace(unsized, nbytes=len(json.dumps(unsized.to_dict())))


class Span(NamedTuple):
    """Bytes to copy: their offsets in the old and in the new part, and their number."""

    source: int
    target: int
    nbytes: int


def key_of(part: RolePart) -> str:
    """Return the name by which a failure report names a part of another role."""
    return f"{part[0]}/{part[1]}"


def part_of(key: str, role: int) -> RolePart:
    """Invert :func:`key_of`; the bare name of a part means a part of ``role``."""
    match = re.fullmatch(r"(\d+)/(.*)", key)
    return (int(match[1]), match[2]) if match else (role, key)


def spans(
    wanted: Iterable[Run], held: Mapping[RolePart, Sequence[Run]]
) -> dict[RolePart, list[Span]]:
    """Return the spans of old parts from which a part with the runs ``wanted`` is put together.

    ``held``: the runs of the old parts, the preferred part first. Where several old parts have an
    element, as with several optimizer instances, it comes from the part whose run ends last. Raises
    CannotReshard.
    """
    by_key: dict[str, list[tuple[RolePart, Run]]] = {}
    for part, runs in held.items():
        for run in runs:
            by_key.setdefault(run.key, []).append((part, run))
    by_part: dict[RolePart, list[Span]] = {}
    for run in wanted:
        at, end = run.start, run.start + run.count
        while at < end:
            candidates = [
                (part, old)
                for part, old in by_key.get(run.key, ())
                if old.start <= at < old.start + old.count
            ]
            if not candidates:
                raise CannotReshard(f"no role of the other size has element {at} of {run.key}")
            part, old = max(candidates, key=lambda each: each[1].start + each[1].count)
            if old.kinds != run.kinds:
                raise CannotReshard(f"the state of {run.key} is of other types at the other size")
            until = min(end, old.start + old.count)
            chosen = by_part.setdefault(part, [])
            for name, (offset, size, step) in run.states.items():
                source, shift = old.states[name][0] + (at - old.start) * step, at - run.start
                if step or not shift:  # a shared value is copied once, with the first element
                    count = (until - at) * step or size
                    chosen.append(Span(source, offset + shift * step, count))
            at = until
    return by_part


def gaps(chosen: Iterable[Span], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each gap between the spans of a part of ``nbytes``; gaps are padding.
    Raises CannotReshard for spans that overlap, or for a gap too large for padding."""
    filled = sorted((span.target, span.target + span.nbytes) for span in chosen)
    for (_, start), (end, _) in pairwise([(0, 0), *filled, (nbytes, nbytes)]):
        if start > end:
            raise CannotReshard(f"two spans for byte {end} of a part of {nbytes}")
        if end - start >= ALIGNMENT_BYTES:
            raise CannotReshard(f"no parameter has bytes {start} to {end} of a part of {nbytes}")
        if start < end:
            yield start, end


def copy_into(target: memoryview, chosen: Iterable[Span], start: int, content: memoryview) -> None:
    """Copy the bytes of ``content`` that the spans need; it is the old part from ``start`` on."""
    end = start + len(content)
    for span in chosen:
        first, last = max(span.source, start), min(span.source + span.nbytes, end)
        if first < last:
            at = span.target + first - span.source
            target[at : at + last - first] = content[first - start : last - start]
