"""What the coordinator's state machine knows: immutable, and nothing else decides what it does.

:class:`Turn` is the handling of one input: it holds the state so far and collects the actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from immutables import Map

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.journal.requests import Request
from deadpool_megatron.cluster.machine.actions import Action, EmitEvent
from deadpool_megatron.cluster.machine.last_words import DumpOrder, LastWords
from deadpool_megatron.cluster.machine.persistent import PersistentSet
from deadpool_megatron.cluster.machine.roster import (
    MemberState,
    MemberStatus,
    NodeState,
    Place,
    Roster,
)
from deadpool_megatron.cluster.machine.timing import Recovery, RecoveryReport
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.decision import BadPart, Planner, RestoreQuery
from deadpool_megatron.layout.parity import parity_groups
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    Inventory,
    Restore,
    RoleLayout,
    Seat,
    Source,
)
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.layout.seats import SeatTable
from deadpool_megatron.preflight.judge import Agreed
from deadpool_megatron.preflight.schedule import Checkup
from deadpool_megatron.settings import Settings

INITIAL = Restore("initial", Generation(0, 0))


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
class Config:
    """Facts of the run. Nodes 0 .. ``nodes`` - 1 are wished for training, the rest are spares.

    ``start``: what epoch 1 begins with (kind initial, durable or dump). ``restarted``: all
    processes of the run had ended, the agents come up again; ``begins_anew``: with the settings of
    a new start, which count from now on. ``check_only``: the run ends when its nodes are judged.
    """

    nodes: int
    spares: int
    nproc: int
    settings: Settings
    dump_directory: str
    start: Restore = INITIAL
    restarted: bool = False
    begins_anew: bool = False
    check_only: bool = False

    @property
    def world_size(self) -> int:
        """Number of roles."""
        return self.nodes * self.nproc

    def provisional_role(self, node: int, slot: int) -> int:
        """The role a member builds for before it has a seat: its stage class is likely needed."""
        return (node % self.nodes) * self.nproc + slot


@dataclass(frozen=True)
class Failure:
    """Why an epoch ends. ``signature``: equal for the same failure again; () is not a failure.

    ``exited``: the process ended by itself, so trying again will most likely end the same.
    ``evidence``: more than ``cause`` for whoever has to find a bug, such as the name of a log.
    """

    cause: str
    kind: FailureKind
    signature: tuple[str, ...] = ()
    exited: bool = False
    node: int | None = None
    evidence: str = ""

    def with_evidence(self) -> str:
        """The cause, and where to look further."""
        return f"{self.cause} [{self.evidence}]" if self.evidence else self.cause

    @staticmethod
    def from_record(values: Mapping[str, Any]) -> Failure:
        """What :meth:`to_record` has kept."""
        kind, signature = FailureKind(values["kind"]), tuple(values["signature"])
        cause, evidence = str(values["cause"]), str(values["evidence"])
        return Failure(cause, kind, signature, bool(values["exited"]), values["node"], evidence)

    def to_record(self, iteration: int) -> dict[str, Any]:
        """What a record of the next epoch says of it; see :class:`History`."""
        return {
            "kind": str(self.kind),
            "cause": self.cause,
            "evidence": self.evidence,
            "signature": list(self.signature),
            "exited": self.exited,
            "iteration": iteration,
            "node": self.node,
        }


@dataclass(frozen=True)
class Suspicion:
    """Something failed, but its cause may still be on the way."""

    failure: Failure
    at: float
    until: float
    bad_parts: frozenset[BadPart] = frozenset()
    doubtful: bool = False  # the generation as a whole did not restore


@dataclass(frozen=True)
class PauseOrder:
    """All members shall stand still after ``iteration``; ``leaving``: node to be drained."""

    iteration: int
    cause: str
    leaving: frozenset[int] = frozenset()
    paused: PersistentSet[int] = field(default_factory=PersistentSet)


@dataclass(frozen=True)
class State:
    """Everything. ``seats``: of the last announced record, before that the wished ones.

    ``epoch``: highest number given to a record. ``record``: the last announced; ``pending``: not
    yet durable; ``redecide``: why it must not be announced any more. ``newest``: last iteration
    reported by an open epoch. ``kept``: see layout.decision.keep_line. ``failures``: those since
    the newest iteration, with it; ``stacks``: where processes stood that hung.
    ``protection``: for the next record; ``protection_why``: why it is another one than the last;
    ``protection_told``: the one that was reported last.
    ``nonfinite``: iterations whose loss was not finite; ``poisoned_from``: the one
    of them from which on nothing may be restored, until an epoch is decided that goes on before
    it. ``missed``: why the epoch found at a takeover must be closed as soon as all agents are back.
    ``last_words``: the run ends with them when its state is saved. ``requests``: of users, open or
    just ended. ``found``: what lay in memory of nodes that no record names yet; ``inherited``:
    roles whose layout is known from memory alone. ``restarted``: new agents have come to an epoch
    that was open. ``returning``: nodes whose agents ended in this recovery, and may come back.
    ``recoveries``: the newest that this coordinator saw; ``recovery_count`` and
    ``steps_recomputed``: of the whole run. ``checkup``: links that are being measured; ``agreed``:
    what the nodes have in common, None until they are judged.
    """

    phase: Phase
    deadline: float | None
    seats: SeatTable
    epoch: int = 0
    record: EpochRecord | None = None
    pending: EpochRecord | None = None
    redecide: Failure | None = None
    nodes: Map[int, NodeState] = field(default_factory=Map)
    gone: Map[int, str] = field(default_factory=Map)
    members: Roster = field(default_factory=Roster)
    layouts: Map[int, RoleLayout] = field(default_factory=Map)
    kept: Mapping[int, int] = field(default_factory=dict)
    inventories: Map[int, Inventory] = field(default_factory=Map)
    found: Map[int, Inventory] = field(default_factory=Map)
    inherited: frozenset[int] = frozenset()
    restarted: bool = False
    returning: frozenset[int] = frozenset()
    awaited: PersistentSet[int] = field(default_factory=PersistentSet)
    restored: PersistentSet[int] = field(default_factory=PersistentSet)
    done: PersistentSet[int] = field(default_factory=PersistentSet)
    newest: int = 0
    ever_ran: bool = False
    durable: Restore | None = None
    bad_parts: frozenset[BadPart] = frozenset()
    doubted: frozenset[Generation] = frozenset()
    bad_generations: frozenset[Generation] = frozenset()
    nonfinite: frozenset[int] = frozenset()
    poisoned_from: int | None = None
    suspicion: Suspicion | None = None
    missed: Failure | None = None
    pause: PauseOrder | None = None
    drains: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    avoid: frozenset[int] = frozenset()
    dump: DumpOrder | None = None
    last_words: LastWords | None = None
    requests: tuple[Request, ...] = ()
    failures: tuple[tuple[int, Failure], ...] = ()
    stacks: tuple[str, ...] = ()
    protection: ProtectionPlan = field(default_factory=ProtectionPlan)
    protection_why: str = ""
    protection_told: ProtectionPlan | None = None
    recovery: Recovery | None = None
    recoveries: tuple[RecoveryReport, ...] = ()
    recovery_count: int = 0
    steps_recomputed: int = 0
    exit_status: int | None = None
    checkup: Checkup | None = None
    agreed: Agreed | None = None

    def changed(self, changes: Mapping[str, Any]) -> State:
        """A copy with other values of these fields; dataclasses.replace(), which passes all of
        them through the constructor, is a tenth of the work on a message.
        """
        assert changes.keys() <= self.__dict__.keys(), f"no such fields: {sorted(changes)}"
        copy = object.__new__(State)
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    @property
    def open_epoch(self) -> int | None:
        """Number of the epoch in which members work, None while there is none."""
        return self.record.epoch if self.record and self.phase in OPEN_PHASES else None

    @property
    def heard_epoch(self) -> int | None:
        """Number of the epoch whose members are listened to: the open one, or after a takeover
        the newest, in which members go on working while the agents come back.
        """
        if self.record is not None and self.phase is Phase.GATHERING:
            return self.record.epoch
        return self.open_epoch

    @property
    def held(self) -> Map[int, Inventory]:
        """Inventories of live nodes: as promised at the close, else as found before they joined."""
        return self.found.update(self.inventories)

    @property
    def is_restored(self) -> bool:
        """Whether every role of the announced record has its state."""
        return self.record is not None and len(self.restored) == len(self.record.seats)

    def absent(self, wished: Iterable[int]) -> list[int]:
        """Nodes that neither are here nor will ever come, ascending."""
        return sorted(node for node in wished if node not in self.nodes and node not in self.gone)

    def role_at(self, node: int, slot: int, incarnation: int) -> int | None:
        """The role this very process has a seat for in the announced record."""
        return self.seats.role_of(node, slot, incarnation) if self.record else None

    def waiting_for(self) -> str:
        """What the phase waits for, in words; empty when it waits for nothing."""
        roles = set(self.seats)
        match self.phase:
            case Phase.GATHERING if self.checkup is not None:
                return f"links of nodes {sorted(self.checkup.awaited)} to be measured"
            case Phase.GATHERING:
                return "nodes and members to start"
            case Phase.CLOSING:
                members = sorted(self.members.killed)
                return f"inventories of nodes {sorted(self.awaited)}, end of members {members}"
            case Phase.WAITING_SPARE:
                back = f", or nodes {sorted(self.returning)} with their slots"
                return f"a node that joins as spare{back if self.returning else ''}"
            case Phase.DECIDING:
                return f"the journal of epoch {self.epoch}"
            case Phase.OPENING:
                return f"restored from roles {sorted(roles - self.restored)}"
            case Phase.PAUSING:
                still = self.pause.paused if self.pause else frozenset[int]()
                return f"roles {sorted(roles - still - self.done)} to pause"
            case Phase.DUMPING if self.dump is not None and self.dump.exporting:
                return f"the checkpoint of what was dumped to {self.dump.restore.path}"
            case Phase.DUMPING:
                return f"dumps of nodes {sorted(self.dump.awaited) if self.dump else []}"
            case Phase.ENDING:
                return f"agents of nodes {sorted(self.nodes)} to go"
        return ""


class Turn:
    """The handling of one input at time ``now`` (seconds, monotonic). Lives no longer than that."""

    def __init__(self, config: Config, planner: Planner, state: State, now: float) -> None:
        self.config = config
        self.planner = planner
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def set(self, **changes: Any) -> None:
        """Replace fields of the state."""
        self.state = self.state.changed(changes)

    def act(self, action: Action) -> None:
        """Append an action."""
        self.actions.append(action)

    def emit(
        self,
        kind: Kind,
        /,
        *,
        node: int | None = None,
        role: int | None = None,
        epoch: int | None = None,
        **data: Any,
    ) -> None:
        """Append an event; ``epoch`` defaults to the announced one."""
        if epoch is None:
            epoch = self.state.record.epoch if self.state.record else 0
        self.act(EmitEvent(kind, epoch, node=node, role=role, data=data))

    def refuse(self, who: str, why: str, node: int | None = None) -> None:
        """Report an input that changes nothing, because it is stale or makes no sense."""
        self.emit(Kind.REFUSED, node=node, who=who, why=why)

    def member(self, place: Place, status: MemberStatus, *, incarnation: int | None = None) -> None:
        """Set status (and incarnation) of a member as of now."""
        if incarnation is None:
            incarnation = self.state.members[place].incarnation
        changed = MemberState(incarnation, status, self.now)
        self.set(members=self.state.members.with_member(place, changed))


def matters(state: State, record: EpochRecord, node: int) -> bool:
    """Whether the loss of ``node`` invalidates the record: a seat, a copy or parity block owed, or
    a source."""
    if any(seat.node == node for seat in record.seats.values()):
        return True
    if not state.is_restored and any(source.node == node for source in _sources(record.restore)):
        return True
    if any(node in group.holders for group in parity_groups(record)):
        return True
    taken_over = state.is_restored or state.phase is Phase.GATHERING
    if taken_over and len(state.layouts) < len(record.seats):
        return node in record.nodes  # it is not known yet whose copies it owes
    placement = CopyPlacement.of_record(record)
    return any(
        node in placement.buddies(role, state.layouts[role].peers if role in state.layouts else ())
        for role in record.seats
    )


def _sources(restore: Restore) -> Iterator[Source]:
    """Every place that a restore may read from."""
    for parts in restore.sources.values():
        for found in parts.values():
            yield from found
    for recipe in restore.recipes.values():
        for decoding in recipe.decodings.values():
            for found in decoding.blocks.values():
                yield from found
        if recipe.replay is not None:
            for parts in recipe.replay.sources.values():
                for found in parts.values():
                    yield from found


def _is_poisoned(state: State, restore: Restore) -> bool:
    limit = state.poisoned_from
    return limit is not None and restore.generation.iteration >= limit


def poisoned_generations(state: State) -> frozenset[Generation]:
    """What nodes hold of an iteration whose loss was not finite, and of later ones."""
    limit = state.poisoned_from
    if limit is None:
        return frozenset()
    held = (h.generation for i in state.held.values() for h in i.holdings)
    return frozenset(generation for generation in held if generation.iteration >= limit)


def restore_query(turn: Turn, seats: Mapping[int, Seat]) -> RestoreQuery:
    """The question what the next epoch is restored from."""
    state, start = turn.state, turn.config.start
    fresh = start.kind == "initial" and not state.ever_ran and not state.newest
    return RestoreQuery(
        epoch=state.epoch + 1,
        world_size=turn.config.world_size,
        inventories=state.held,
        seats=seats,
        owners=state.seats,
        kept=state.kept,
        layouts=state.layouts,
        bad_parts=state.bad_parts,
        bad_generations=state.bad_generations | poisoned_generations(state),
        durable=None if state.durable and _is_poisoned(state, state.durable) else state.durable,
        start=start if fresh else None,
    )
