"""Shard maps, and how a part is cut from the parts of another number of model replicas. Pure.

A shard map lists the elements of parameters that a role has, and where their state is in its parts.
A parameter is named with its slice of the whole model, without data-parallel rank: equal keys are
the same numbers at every size. Padding and the borders of buckets differ between sizes, so nothing
else decides which bytes are copied.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from deadpool_megatron.wire.forms import Coded, Listed

# A role, and the name of a shard part of it.
RolePart = tuple[int, str]


class CannotReshard(ValueError):
    """A part cannot be cut from the parts at hand; the message has the reason."""


@dataclass(frozen=True)
class Run(Listed):
    """Consecutive elements of a parameter, and the places of their state in a part.

    ``key``: the parameter's slice of the model. ``states``: state with its type -> offset of the
    first element, bytes of each. ``singles``: state that has one value for all elements -> offset,
    bytes.
    """

    key: str
    start: int
    count: int
    states: Mapping[str, tuple[int, int]]
    singles: Mapping[str, tuple[int, int]]

    @property
    def kinds(self) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
        """Return names and bytes of the state, for all elements and for each."""
        both = self.states, self.singles
        each, single = ({(name, size) for name, (_, size) in kept.items()} for kept in both)
        return each, single


@dataclass(frozen=True)
class ShardMap(Coded):
    """The runs of each shard part of a role. ``nbytes``: the size of its JSON form, even if the
    runs are left out; 0 for a role whose parts cannot be cut."""

    nbytes: int = 0
    runs: Mapping[str, tuple[Run, ...]] = field(default_factory=dict)

    @staticmethod
    def of(runs: Mapping[str, tuple[Run, ...]]) -> ShardMap:
        """Return the map with these runs."""
        found = ShardMap(runs=runs)
        return replace(found, nbytes=len(json.dumps(found.to_dict())))


class Span(NamedTuple):
    """Bytes to copy: their offsets in the old and in the new part, and their number."""

    source: int
    target: int
    nbytes: int


def spans(
    wanted: Iterable[Run], held: Mapping[RolePart, Sequence[Run]]
) -> dict[RolePart, list[Span]]:
    """Return the spans of old parts of which a part with the runs ``wanted`` consists.

    ``held``: the runs of the old parts, the preferred first. An element that several of them hold,
    as instances of an optimizer do, comes from the longest rest. Raises CannotReshard.
    """
    by_key: dict[str, list[tuple[RolePart, Run]]] = {}
    for part, runs in held.items():
        for run in runs:
            by_key.setdefault(run.key, []).append((part, run))
    found: dict[RolePart, list[Span]] = {}
    for run in wanted:
        at, end = run.start, run.start + run.count
        while at < end:
            covering = [
                (part, old)
                for part, old in by_key.get(run.key, ())
                if old.start <= at < old.start + old.count
            ]
            if not covering:
                raise CannotReshard(f"no role of the other size has element {at} of {run.key}")
            part, old = max(covering, key=lambda each: each[1].start + each[1].count)
            if old.kinds != run.kinds:
                raise CannotReshard(f"the state of {run.key} is of other types at the other size")
            until = min(end, old.start + old.count)
            chosen = found.setdefault(part, [])
            for name, (offset, size) in run.states.items():
                source = old.states[name][0] + (at - old.start) * size
                target = offset + (at - run.start) * size
                chosen.append(Span(source, target, (until - at) * size))
            for name, (offset, size) in run.singles.items() if at == run.start else ():
                chosen.append(Span(old.singles[name][0], offset, size))
            at = until
    return found


def gaps(chosen: Iterable[Span], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the ranges of a part of ``nbytes`` that no span fills: alignment.
    Raises CannotReshard for spans that overlap, or do not fit."""
    taken = sorted((span.target, span.target + span.nbytes) for span in chosen)
    for (_, start), (end, _) in pairwise([(0, 0), *taken, (nbytes, nbytes)]):
        if start > end:
            raise CannotReshard(f"two spans for byte {end} of a part of {nbytes}")
        if start < end:
            yield start, end


def copy_into(target: memoryview, chosen: Iterable[Span], start: int, content: memoryview) -> None:
    """Copy what the spans need of ``content``, the bytes of an old part from ``start`` on."""
    end = start + len(content)
    for span in chosen:
        first, last = max(span.source, start), min(span.source + span.nbytes, end)
        if first < last:
            at = span.target + first - span.source
            target[at : at + last - first] = content[first - start : last - start]
