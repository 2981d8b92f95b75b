"""Megatron's numbering of the ranks of a run, and the groups and slices that follow from it. Pure.

A rank is a mixed-radix number whose first dimension counts fastest (parallel_state.py,
RankGenerator); experts have an order of their own. The size of a run is its number of model
replicas: the ranks with one data-parallel rank are a replica.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from deadpool_megatron.wire.forms import Coded

#: dimension -> distance of neighbours along it, and its size; the fastest dimension is first
Axes = Mapping[str, tuple[int, int]]


class Coordinates(NamedTuple):
    """The slice of the model on a rank: its position along each dimension that splits the model."""

    tensor: int
    context: int
    pipeline: int
    expert: int
    expert_tensor: int


class Division(NamedTuple):
    """A division that must leave no remainder: ``whole`` by ``part``. ``key``: the setting of a
    plan that can change it."""

    key: str
    part: int
    name: str
    whole: int

    @property
    def problem(self) -> str:
        """Return a message about the remainder; empty if there is none."""
        text = f"{self.name} ({self.whole}) is no multiple of {self.part}"
        return text if self.whole % self.part else ""


@dataclass(frozen=True)
class Grid(Coded):
    """The split of a model replica: tensor, context, pipeline, expert and expert-tensor parallel
    sizes, and the instances of the distributed optimizer. ``data_last``: the data-parallel rank
    counts slowest (--use-tp-pp-dp-mapping)."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    instances: int = 1
    data_last: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of ranks of a replica."""
        return self.tp * self.cp * self.pp

    @property
    def unit(self) -> int:
        """Return the number of replicas after which the slices of a stage repeat: above 1 where
        experts are spread over several replicas."""
        return lcm(self.tp * self.cp, self.etp * self.ep) // (self.tp * self.cp)

    def divisions(self, replicas: int) -> Iterator[Division]:
        """Yield the divisions that Megatron demands of ``replicas`` replicas."""
        data, stage = self.cp * replicas, self.tp * self.cp * replicas
        yield Division("optimizer_instances", self.instances, "dp x cp", data)
        yield Division("etp", self.etp, "tp x cp x dp", stage)
        yield Division("ep", self.ep, "tp x cp x dp / etp", stage // self.etp)
        expert = stage // self.etp // self.ep
        yield Division("optimizer_instances", self.instances, "expert data parallelism", expert)

    def coordinates(self, rank: int, replicas: int) -> Coordinates:
        """Return the slice of a rank among ``replicas`` replicas."""
        dense, experts = map(_digits, self._axes(replicas), (rank, rank))
        return Coordinates(dense["tp"], dense["cp"], dense["pp"], experts["ep"], experts["tp"])

    def data_peers(self, rank: int, replicas: int) -> tuple[int, ...]:
        """Return Megatron's data-parallel group with context parallelism, ascending."""
        return _group(self._axes(replicas)[0], rank, "cp", "dp")

    def expert_data_peers(self, rank: int, replicas: int) -> tuple[int, ...]:
        """Return Megatron's expert data-parallel group, ascending."""
        return _group(self._axes(replicas)[1], rank, "dp")

    def donor(self, rank: int, replicas: int, donor_replicas: int) -> int:
        """Return the first rank, in a run of ``donor_replicas`` replicas, with the slice that
        ``rank`` has in a run of ``replicas`` replicas."""
        digits = _digits(self._axes(replicas)[0], rank)
        digits["dp"] %= self.unit
        return sum(digits[name] * step for name, (step, _) in self._axes(donor_replicas)[0].items())

    def _axes(self, replicas: int) -> tuple[Axes, Axes]:
        """Return the axes of dense layers and of experts."""
        expert = self.tp * self.cp * replicas // (self.etp * self.ep)
        dense_sizes = {"tp": self.tp, "cp": self.cp, "dp": replicas, "pp": self.pp}
        return self._in_order(dense_sizes), self._in_order(
            {"tp": self.etp, "ep": self.ep, "dp": expert, "pp": self.pp}
        )

    def _in_order(self, sizes: dict[str, int]) -> Axes:
        if self.data_last:
            sizes["dp"] = sizes.pop("dp")
        steps = itertools.accumulate(sizes.values(), operator.mul, initial=1)
        return {name: (step, sizes[name]) for name, step in zip(sizes, steps, strict=False)}


def _digits(axes: Axes, rank: int) -> dict[str, int]:
    return {name: rank // step % size for name, (step, size) in axes.items()}


def _group(axes: Axes, rank: int, *names: str) -> tuple[int, ...]:
    """Return ``rank`` and all ranks that differ from it only along the dimensions ``names``, of
    which the fastest is named first."""
    found = [rank - sum(axes[name][0] * _digits(axes, rank)[name] for name in names)]
    for step, size in (axes[name] for name in names):
        found = [first + step * number for number in range(size) for first in found]
    return tuple(found)
