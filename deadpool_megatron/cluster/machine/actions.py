"""Actions, the output of the coordinator's state machine: orders to carry out in sequence.

Plain frozen data. An action returns nothing; its outcome comes back as an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore


class Action:
    """Base class of all actions."""


@dataclass(frozen=True)
class WriteRecord(Action):
    """Make the record durable, then return JournalWritten (or JournalFailed) as an input."""

    record: EpochRecord


@dataclass(frozen=True)
class Note(Action):
    """Journal a note (kind, number, entry) for a successor, since the next record, which contains
    the same facts, may come much later."""

    kind: str
    number: int
    entry: Mapping[str, Any]


@dataclass(frozen=True)
class Announce(Action):
    """Send the record to every agent. ``forgotten_from``: numbers that were reported for this
    iteration and later are void, as these iterations are computed again with other results."""

    record: EpochRecord
    forgotten_from: int | None = None


@dataclass(frozen=True)
class Welcome(Action):
    """Answer a join with the current record, or None before there is any."""

    node: int
    record: EpochRecord | None


@dataclass(frozen=True)
class DropNode(Action):
    """Order the agent to stop, close its connection, and accept no more messages from it.
    ``excluded``: the host is not fit for the run, and must not join again."""

    node: int
    cause: str
    excluded: bool = False


@dataclass(frozen=True)
class StartMembers(Action):
    """Start processes. ``incarnations``: local rank -> incarnation;
    ``provisional_roles``: local rank -> role to build for."""

    node: int
    incarnations: Mapping[int, int]
    provisional_roles: Mapping[int, int]


@dataclass(frozen=True)
class KillMember(Action):
    """Kill the process; MemberLost comes back when it is reaped.

    ``hung``: the process makes no progress, so its stacks are collected first.
    """

    node: int
    local_rank: int
    incarnation: int
    hung: bool = False


@dataclass(frozen=True)
class CloseEpoch(Action):
    """Order every agent to close the epoch; their inventories come back. Sent once per epoch."""

    epoch: int
    cause: str


@dataclass(frozen=True)
class Pause(Action):
    """Order every member to pause before iteration ``iteration`` + 1; the latest order counts."""

    epoch: int
    iteration: int


@dataclass(frozen=True)
class Dump(Action):
    """Have the vaults of ``nodes`` write their parts of the generation to ``directory``. If
    ``held`` is not empty, they write their parts of these generations, each to a subdirectory."""

    nodes: tuple[int, ...]
    directory: str
    generation: Generation
    boundary: str
    held: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class ExportDump(Action):
    """Make a standard checkpoint of a generation that was dumped whole, then return DumpExported as
    an input. ``roles``: role -> node that writes its part."""

    restore: Restore
    roles: Mapping[int, int]


@dataclass(frozen=True)
class BeginExport(Action):
    """Make a later iteration a standard checkpoint in ``directory``, then return Exported, with the
    ``number`` of the request, as an input."""

    number: int
    directory: str


@dataclass(frozen=True)
class EndRun(Action):
    """End the run with a dump, within ``seconds`` if given, after a last export where that is
    configured; DumpRequested comes back."""

    reason: str
    seconds: float | None


@dataclass(frozen=True)
class InspectCheckpoints(Action):
    """Check that the checkpoints still exist, then return CheckpointsFound as an input."""

    valid: tuple[Restore, ...]


@dataclass(frozen=True)
class Finish(Action):
    """Write final.json, have every agent stop and clean up; ``resume``: where to continue later.

    ``kind``: FailureKind value of the failure that ended the run; empty if there was none.
    ``keeps_slots``: the agents leave the slots in memory. ``is_early``: the program ended before
    its last iteration; :meth:`with_checkpoint` then decides how the run ends.
    """

    exit_status: int
    reason: str
    resume: Restore | None = None
    kind: str = ""
    keeps_slots: bool = False
    is_early: bool = False

    def with_checkpoint(self, durable: Restore | None) -> Finish:
        """Return the action for a run whose newest checkpoint is ``durable``, after every requested
        save has become valid. A run that ended early can continue from that checkpoint."""
        if not self.is_early:
            return self
        if durable is None:
            reason = f"{self.reason}, and there is no checkpoint to continue from (--save)"
            return replace(self, exit_status=1, reason=reason)
        return replace(self, reason=f"{self.reason}, continues from {durable.path}")


@dataclass(frozen=True)
class ExpediteExit(Action):
    """End all waits of a run that is ending, because the user does not want to wait."""


@dataclass(frozen=True)
class Exit(Action):
    """End the coordinator: all agents have left, or their time is over."""

    exit_status: int


@dataclass(frozen=True)
class EmitEvent(Action):
    """Emit an event, without its clocks, which the machine does not know."""

    kind: Kind
    epoch: int = 0
    node: int | None = None
    role: int | None = None
    iteration: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_event(self) -> Event:
        """Return the event, stamped with the current clocks."""
        return Event(self.kind, self.epoch, self.node, self.role, self.iteration, data=self.data)
