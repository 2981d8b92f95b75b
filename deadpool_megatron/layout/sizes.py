"""The sizes at which a program can train: its possible numbers of model replicas. Pure.

A model replica is the tp x cp x pp ranks that share a data-parallel rank. Only members know
Megatron's rules, so they report the possible sizes when they register.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deadpool_megatron.layout.grid import Grid
from deadpool_megatron.layout.ranks import SIZE_STEP
from deadpool_megatron.settings import SchemeKind
from deadpool_megatron.wire.forms import Coded


@dataclass(frozen=True)
class Sizes(Coded):
    """The numbers of model replicas with which this program can train.

    ``replicas``: ascending, the full number last; each number fills whole nodes.
    ``ranks_per_replica``: ranks of one model replica (tp x cp x pp). ``reason``: why no smaller
    number is possible; empty if there is a smaller number. ``grid``: the split of a replica.
    """

    ranks_per_replica: int
    replicas: tuple[int, ...]
    reason: str = ""
    grid: Grid = field(default_factory=Grid)

    def roles(self, count: int, first: int) -> range:
        """Return the role numbers of a run of ``count`` roles; no two sizes share a number.
        ``first``: the role of rank 0 at full size."""
        begin = first + (self.replicas[-1] - count // self.ranks_per_replica) * SIZE_STEP
        return range(begin, begin + count)

    def fixed(self, reason: str) -> Sizes:
        """Return sizes that allow only the full number, because of ``reason``; self if it is
        empty."""
        if not reason:
            return self
        return replace(self, replicas=self.replicas[-1:], reason=self.reason or reason)


def fixed_by_scheme(scheme: str) -> str:
    """Return why the number of model replicas is fixed under this scheme; empty if it is not."""
    is_fixed = SchemeKind(scheme).is_local
    return f"--deadpool-protection {scheme} is for one size" if is_fixed else ""


@dataclass(frozen=True)
class SizeChanges(Coded):
    """Changes of the number of model replicas, as far as a coordinator must know them.

    ``trained``: the number of roles that have completed the newest iteration, if any has.
    ``failed``: the size of each change that failed. ``wait_seconds``: how long to wait for a spare:
    as long as the start took until all roles had their state, or twice as long as the last change.
    """

    trained: int = 0
    failed: tuple[int, ...] = ()
    wait_seconds: float = 0.0
