"""Actions, the output of the coordinator's state machine: orders to carry out, in their order.

Plain frozen data. Carrying one out never answers; its outcome comes back as an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore


class Action:
    """Base of all of them."""


@dataclass(frozen=True)
class WriteRecord(Action):
    """Make the record durable, then give JournalWritten (or JournalFailed) back."""

    record: EpochRecord


@dataclass(frozen=True)
class RecordRemoved(Action):
    """Journal that a node was given up: the record that says so may come much later."""

    node: int
    cause: str


@dataclass(frozen=True)
class RecordQuarantined(Action):
    """Journal that a node gets no role any more, for the same reason. ``host``: no other node from
    there does, either; empty where others are on that host."""

    node: int
    host: str
    cause: str


@dataclass(frozen=True)
class Announce(Action):
    """Send the record to every agent. ``forgotten_from``: the numbers of this iteration and of
    later ones count no more, as one was not finite."""

    record: EpochRecord
    forgotten_from: int | None = None


@dataclass(frozen=True)
class Welcome(Action):
    """Answer to a join: the current record, if there is one."""

    node: int
    record: EpochRecord | None


@dataclass(frozen=True)
class DropNode(Action):
    """Tell the agent to stop, close its connection, take nothing more from it. ``left_out``: its
    host is not fit for the run, and is not to come again.
    """

    node: int
    cause: str
    left_out: bool = False


@dataclass(frozen=True)
class StartMembers(Action):
    """Start processes. ``slots``, as on the wire: local rank -> incarnation;
    ``provisional_roles``: local rank -> role to build for."""

    node: int
    slots: Mapping[int, int]
    provisional_roles: Mapping[int, int]


@dataclass(frozen=True)
class KillMember(Action):
    """Kill the process; MemberLost comes back when it is reaped.

    ``hung``: it does not move, and is asked for its stacks before.
    """

    node: int
    slot: int
    incarnation: int
    hung: bool = False


@dataclass(frozen=True)
class CloseEpoch(Action):
    """Send to every agent; their inventories come back. Happens once for an epoch."""

    epoch: int
    cause: str


@dataclass(frozen=True)
class Pause(Action):
    """Send to every member: stand still before iteration ``iteration`` + 1; the latest counts."""

    epoch: int
    iteration: int


@dataclass(frozen=True)
class Dump(Action):
    """The vaults of ``nodes`` write what they hold of the generation to ``directory``; if ``held``
    is not empty, of all these generations, each to its own directory below.
    """

    nodes: tuple[int, ...]
    directory: str
    generation: Generation
    boundary: str
    held: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class ExportDump(Action):
    """Make a standard checkpoint of a generation that was dumped whole, then give DumpExported
    back. ``roles``: role -> node that writes its part."""

    restore: Restore
    roles: Mapping[int, int]


@dataclass(frozen=True)
class BeginExport(Action):
    """Have one of the next iterations made a standard checkpoint in ``directory``, then give
    Exported back with the ``number``, of the request."""

    number: int
    directory: str


@dataclass(frozen=True)
class EndRun(Action):
    """Have the run end with a dump, in so many seconds if they are given, after a last export
    where that is configured; DumpRequested comes back."""

    reason: str
    seconds: float | None


@dataclass(frozen=True)
class LookAtCheckpoints(Action):
    """See whether they are there, then give CheckpointsFound back."""

    valid: tuple[Restore, ...]


@dataclass(frozen=True)
class Finish(Action):
    """Write final.json, tell every agent to stop and remove; ``resume``: where to continue later.

    ``kind``: of the failure that ended the run, a value of FailureKind; empty when it was none.
    ``keeps_slots``: the agents do not remove what they hold in memory. ``is_early``: the program
    ended before its last iteration; :meth:`going_on` says how the run ends then.
    """

    exit_status: int
    reason: str
    resume: Restore | None = None
    kind: str = ""
    keeps_slots: bool = False
    is_early: bool = False

    def going_on(self, durable: Restore | None) -> Finish:
        """The end of a run whose newest checkpoint is ``durable``, when all that was asked for is
        valid: one that ended early is continued with, if that can be."""
        if not self.is_early:
            return self
        if durable is None:
            reason = f"{self.reason}, and there is no checkpoint to continue from (--save)"
            return replace(self, exit_status=1, reason=reason)
        return replace(self, reason=f"{self.reason}, continues from {durable.path}")


@dataclass(frozen=True)
class ExpediteExit(Action):
    """The user has no time for what the end of the run waits for."""


@dataclass(frozen=True)
class Exit(Action):
    """All agents have gone, or had their time: the coordinator ends."""

    exit_status: int


@dataclass(frozen=True)
class EmitEvent(Action):
    """An event without its clocks, which the machine does not know."""

    kind: Kind
    epoch: int = 0
    node: int | None = None
    role: int | None = None
    iteration: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_event(self) -> Event:
        """The event, stamped with the clocks of now."""
        return Event(self.kind, self.epoch, self.node, self.role, self.iteration, data=self.data)
