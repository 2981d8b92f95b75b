"""The sizes that a program can have: its numbers of model replicas. Pure.

A model replica is all ranks with one data-parallel rank: tensor x context x pipeline parallelism.
Megatron's rules are known to members only; they report the sizes when they register.
"""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.wire.forms import Coded


@dataclass(frozen=True)
class Sizes(Coded):
    """The numbers of model replicas with which this program can train.

    ``replicas``: ascending, the full number last; each of them fills whole nodes.
    ``ranks_per_replica``: ranks of one model replica (tp x cp x pp). ``reason``: why no smaller
    number is possible; empty where some are.
    """

    ranks_per_replica: int
    replicas: tuple[int, ...]
    reason: str = ""


def fitting(sizes: Sizes, slots: int, per_node: int) -> int:
    """Return the largest number of model replicas for ``slots`` places of members, of which only
    those of whole nodes with ``per_node`` places count; 0 if none fits."""
    places = slots // per_node * per_node
    return max((n for n in sizes.replicas if n * sizes.ranks_per_replica <= places), default=0)
