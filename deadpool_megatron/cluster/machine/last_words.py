"""How a run ends, and what is written before it does."""

from __future__ import annotations

from dataclasses import dataclass, field

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.persistent import PersistentSet
from deadpool_megatron.layout.records import Generation, Restore


@dataclass(frozen=True)
class LastWords:
    """How the run ends once its state is saved. ``kind``: of the failure that ends it.
    ``exports``: a dump is made a checkpoint, too, as nobody waits for the end."""

    status: int
    reason: str
    kind: FailureKind | None = None
    exports: bool = False


@dataclass(frozen=True)
class DumpOrder:
    """What is being written to disk, and which nodes have finished. ``chains``: generations that
    are written in part, for roles that recompute their shard parts from them. ``held``: all that
    the nodes hold is written, as no generation is whole, else the one of ``restore``; a run goes on
    from ``resume`` then, if there is one. ``failed``: nodes that could not write, now or when
    another generation was tried before. ``exporting``: all of it is written, and a checkpoint is
    being made of it.
    """

    restore: Restore
    awaited: PersistentSet[int]
    finished: PersistentSet[int] = field(default_factory=PersistentSet)
    chains: frozenset[Generation] = frozenset()
    held: bool = False
    resume: Restore | None = None
    failed: frozenset[int] = frozenset()
    exporting: bool = False
