"""Phases of the machine, and what is known only during one of them.

Each phase is a frozen object with its own fields; :data:`Doing` is one of them. What outlives a
phase is a field of the state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from deadpool_megatron.cluster.machine.state.blame import Failure, LastWords
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore
from deadpool_megatron.preflight.judge import Checkup


class Phase(StrEnum):
    """Names of the phases; every phase but RUNNING and ENDED has a deadline."""

    GATHERING = "gathering"
    CLOSING = "closing"
    WAITING_SPARE = "waiting for a spare"
    DECIDING = "deciding"
    OPENING = "opening"
    RUNNING = "running"
    PAUSING = "pausing"
    DUMPING = "dumping"
    ENDING = "ending"
    ENDED = "ended"


LAST_PHASES = frozenset({Phase.DUMPING, Phase.ENDING, Phase.ENDED})


@dataclass(frozen=True)
class PauseOrder:
    """All members shall stand still after ``iteration``; ``leaving``: node to be drained."""

    iteration: int
    cause: str
    leaving: frozenset[int] = frozenset()
    paused: PersistentSet[int] = field(default_factory=PersistentSet)


@dataclass(frozen=True)
class Gathering:
    """Waits for the first members. ``checkup``: links that are being measured."""

    phase: ClassVar = Phase.GATHERING
    deadline: float
    checkup: Checkup | None = None


@dataclass(frozen=True)
class Rejoining:
    """A coordinator has taken over: the newest epoch continues while its agents come back.

    ``missed``: why it must be closed as soon as all are back. ``restored``, ``done``: roles that
    have their state, or have completed their last iteration. ``begins``: as in :class:`Opening`.
    ``pause``: ordered earlier.
    ``requests``: numbers of those that are over if it turns out that no process is left of before.
    """

    phase: ClassVar = Phase.GATHERING
    deadline: float
    missed: Failure | None = None
    restored: PersistentSet[int] = field(default_factory=PersistentSet)
    done: PersistentSet[int] = field(default_factory=PersistentSet)
    begins: Generation | None = None
    pause: PauseOrder | None = None
    requests: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Closing:
    """Waits for the inventories of nodes, and for the end of killed members; ``looks``: for nothing
    any more but a look at the checkpoints."""

    phase: ClassVar = Phase.CLOSING
    deadline: float
    awaited: PersistentSet[int] = field(default_factory=PersistentSet)
    looks: bool = False


@dataclass(frozen=True)
class WaitingSpare:
    """Waits for a node that joins."""

    phase: ClassVar = Phase.WAITING_SPARE
    deadline: float


@dataclass(frozen=True)
class Deciding:
    """Waits for the journal. ``redecide``: why ``pending`` must not be announced any more."""

    phase: ClassVar = Phase.DECIDING
    deadline: float
    pending: EpochRecord
    redecide: Failure | None = None


@dataclass(frozen=True)
class Opening:
    """Waits until every role has restored. ``begins``: the generation that the roles of an initial
    start have told. ``pause``: wanted as soon as the epoch runs."""

    phase: ClassVar = Phase.OPENING
    deadline: float
    restored: PersistentSet[int] = field(default_factory=PersistentSet)
    done: PersistentSet[int] = field(default_factory=PersistentSet)
    begins: Generation | None = None
    pause: PauseOrder | None = None


@dataclass(frozen=True)
class Running:
    """All roles train."""

    phase: ClassVar = Phase.RUNNING
    deadline: ClassVar[None] = None
    done: PersistentSet[int] = field(default_factory=PersistentSet)


@dataclass(frozen=True)
class Pausing:
    """Runs, until all members stand still at one iteration."""

    phase: ClassVar = Phase.PAUSING
    deadline: float
    order: PauseOrder
    done: PersistentSet[int] = field(default_factory=PersistentSet)


@dataclass(frozen=True)
class Dumping:
    """Nodes write to disk what they hold; then the run ends with ``words``.

    ``chains``: generations that are written in part, for roles that recompute their shard parts
    from them. ``held``: all that the nodes hold is written, as no generation is whole, else the one
    of ``restore``; a run continues from ``resume`` then, if there is one. ``failed``: nodes that
    could not write, now or when another generation was tried before. ``damaged``: a node has found
    bytes damaged that it was counted on for. ``exporting``: all of it is written, and a checkpoint
    is being made of it.
    """

    phase: ClassVar = Phase.DUMPING
    deadline: float
    words: LastWords
    restore: Restore
    awaited: PersistentSet[int]
    finished: PersistentSet[int] = field(default_factory=PersistentSet)
    chains: frozenset[Generation] = frozenset()
    held: bool = False
    resume: Restore | None = None
    failed: frozenset[int] = frozenset()
    damaged: bool = False
    exporting: bool = False


@dataclass(frozen=True)
class Ending:
    """Waits for the agents to go."""

    phase: ClassVar = Phase.ENDING
    deadline: float
    status: int


@dataclass(frozen=True)
class Ended:
    """There is nothing left to do."""

    phase: ClassVar = Phase.ENDED
    deadline: ClassVar[None] = None


# The epoch is open; its members are heard while agents come back, too.
Open = Opening | Running | Pausing
Heard = Rejoining | Open
Doing = Gathering | Heard | Closing | WaitingSpare | Deciding | Dumping | Ending | Ended
