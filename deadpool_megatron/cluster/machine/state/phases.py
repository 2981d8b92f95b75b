"""What the machine is doing, and what is known only while it does that."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.layout.records import Generation, Restore


class Phase(StrEnum):
    """What the machine is doing; every phase but RUNNING and ENDED has a deadline."""

    GATHERING = "gathering"  # waits for the first members, or after a restart for the old ones
    CLOSING = "closing"  # waits for inventories
    WAITING_SPARE = "waiting for a spare"
    DECIDING = "deciding"  # waits for the journal
    OPENING = "opening"  # waits until every role has restored
    RUNNING = "running"
    PAUSING = "pausing"  # runs, until all members stand still at one iteration
    DUMPING = "dumping"
    ENDING = "ending"  # waits for the agents to go
    ENDED = "ended"


OPEN_PHASES = frozenset({Phase.OPENING, Phase.RUNNING, Phase.PAUSING})
LAST_PHASES = frozenset({Phase.DUMPING, Phase.ENDING, Phase.ENDED})


@dataclass(frozen=True)
class PauseOrder:
    """All members shall stand still after ``iteration``; ``leaving``: node to be drained."""

    iteration: int
    cause: str
    leaving: frozenset[int] = frozenset()
    paused: PersistentSet[int] = field(default_factory=PersistentSet)


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
