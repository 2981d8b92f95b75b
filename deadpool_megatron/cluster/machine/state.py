"""Knowledge of the coordinator's state machine: data and look-ups, nothing is decided here.

It changes with each input. Each phase is an object of its own with what is known only during it;
what outlives a phase is a field of the state. Names of sets that are small are bound to new ones,
those that hold roles or members are changed in place: copied for every message of ten thousand
members they would be quadratic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from deadpool_megatron.cluster.journal.user_requests import Request, Verb
from deadpool_megatron.cluster.machine.blame import Blame, Failure, LastWords
from deadpool_megatron.cluster.machine.recoveries import Recoveries
from deadpool_megatron.layout import records
from deadpool_megatron.layout.planner import common_layouts, is_kept
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.preflight.eligibility import Agreed, Eligibility, HostFacts, Judgement
from deadpool_megatron.settings import Settings

NOTHING = records.Generation(0, 0)
INITIAL = records.Restore("initial", NOTHING)
Place = tuple[int, int]  # (node, local rank)


@dataclass(frozen=True)
class Config:
    """Facts of the run. Nodes 0 .. ``nodes`` - 1 are wished for training, the rest are spares.

    ``start``: what epoch 1 begins with (kind initial, durable or dump); ``older``: what can be
    fallen back to where that cannot be loaded. ``restarted``: all
    processes of the run had ended, the agents come up again; ``begins_anew``: with the settings of
    a new start, which count from now on. ``check_only``: the run ends when its nodes are judged.
    ``finished``: iterations that were finished before the start; ``from_scratch``: it may begin
    again where nothing is left of them.
    """

    nodes: int
    spares: int
    nproc: int
    settings: Settings
    dump_directory: str
    start: records.Restore = INITIAL
    older: tuple[records.Restore, ...] = ()
    restarted: bool = False
    begins_anew: bool = False
    check_only: bool = False
    finished: int = 0
    from_scratch: bool = False

    @property
    def world_size(self) -> int:
        """Number of roles at full size."""
        return self.nodes * self.nproc

    def provisional_role(self, node: int, local_rank: int) -> int:
        """The role a member builds for before it has a seat: its stage class is likely needed."""
        return (node % self.nodes) * self.nproc + local_rank


# Nodes and members.


class MemberStatus(StrEnum):
    """Life of a member process; a lost one is replaced at once by its next incarnation."""

    STARTING = "starting"
    RUNNING = "running"
    WARM = "warm"
    KILLED = "killed"  # told to die, not reaped yet


@dataclass(frozen=True)
class MemberState:
    """``since``: when it was started, told to be warm, or killed (seconds)."""

    incarnation: int
    status: MemberStatus
    since: float


@dataclass
class NodeState:
    """A connected node. ``restarts``: how often a process had to be replaced on it.

    ``restarted_at`` and ``crashed_at``: when, within the last ten minutes;
    crashes are those that ended an epoch. ``host_errors``: in the whole run. ``memory_bytes``:
    for generations, 0 when it is not known. ``facts``: what it has said about its host last, None
    for nothing; ``judged``: what it is good for. ``returns``: see :class:`.inputs.NodeJoined`.
    """

    host: str
    vault_port: int
    domain: str
    memory_bytes: int = 0
    returns: bool = False
    restarts: int = 0
    restarted_at: tuple[float, ...] = ()
    crashed_at: tuple[float, ...] = ()
    host_errors: int = 0
    facts: HostFacts | None = None
    judged: Judgement = field(default_factory=Judgement)

    @property
    def host_name(self) -> str:
        """Of its machine, as far as it is known: nodes that come later from there have the same."""
        return self.host if self.facts is None else self.facts.hostname


@dataclass
class Fleet:
    """``nodes``: connected ones. ``removed``: those given up, with the cause. ``drains``: nodes
    whose roles are to move as soon as a spare can take them, and as long as there are such those
    that have moved: no spares for the others; ``draining``: nodes that have no role in the next
    record; ``deprioritized``: nodes that get a role last; ``distrusted``: those quarantined for
    crashes, slowness or their health, which get one only where a failure leaves no other node;
    ``quarantined``: those found to compute or hold wrong numbers, or to have a broken device, which
    get none any more;
    ``quarantined_hosts``: those all of whose nodes were found so, from where none gets any.
    ``returning``: nodes whose agents ended in this recovery, and may come back.
    """

    nodes: dict[int, NodeState] = field(default_factory=dict)
    removed: dict[int, str] = field(default_factory=dict)
    members: dict[Place, MemberState] = field(default_factory=dict)
    drains: frozenset[int] = frozenset()
    draining: frozenset[int] = frozenset()
    deprioritized: frozenset[int] = frozenset()
    distrusted: frozenset[int] = frozenset()
    quarantined: frozenset[int] = frozenset()
    quarantined_hosts: frozenset[str] = frozenset()
    returning: frozenset[int] = frozenset()

    @property
    def aside(self) -> frozenset[int]:
        """Nodes that are no good spares."""
        return self.deprioritized | self.quarantined

    def distrust(self, nodes: frozenset[int]) -> None:
        """Quarantine these nodes; a role they have stays until it is moved."""
        self.distrusted |= nodes
        self.deprioritized |= nodes

    def having(self, *statuses: MemberStatus) -> list[Place]:
        """Return where members of these states are, in order."""
        return sorted(place for place, one in self.members.items() if one.status in statuses)

    def absent(self, wished: Iterable[int]) -> list[int]:
        """Returns nodes that neither are here nor will ever come, ascending."""
        return sorted(
            node for node in wished if node not in self.nodes and node not in self.removed
        )


@dataclass
class Memory:
    """Contents of the memory of the nodes, as far as they have said. ``promised``: inventories of
    the last close. ``found``: what lay in memory of nodes that no record names yet. ``layouts``:
    how roles lay out their state; ``inherited``: roles of which that is known from memory alone.
    """

    promised: dict[int, records.Inventory] = field(default_factory=dict)
    found: dict[int, records.Inventory] = field(default_factory=dict)
    layouts: dict[int, records.RoleLayout] = field(default_factory=dict)
    inherited: frozenset[int] = frozenset()

    @property
    def held(self) -> dict[int, records.Inventory]:
        """Inventories of live nodes: as promised at the close, else as found before they joined."""
        return {**self.found, **self.promised}

    @property
    def has_computed(self) -> bool:
        """Return whether a generation is held that an iteration has made."""
        found = (holding for one in self.held.values() for holding in one.holdings)
        return any(holding.generation.iteration > 0 for holding in found)

    def in_slots(self, roles: Iterable[int]) -> dict[int, records.RoleLayout]:
        """Return the layouts that the slots tell of roles whose members have not told this
        coordinator yet how they lay out their state."""
        unknown = set(roles) - self.layouts.keys()
        return common_layouts(unknown, self.held.values()) if unknown else {}

    def drop_node(self, node: int) -> None:
        """Forget what a node held."""
        self.promised.pop(node, None)
        self.found.pop(node, None)


# The line of the run.


@dataclass
class LineageProgress:
    """``kept``: see layout.planner.keep_lineages. ``newest``: last iteration reported by an open
    epoch. ``valid``: what the run can fall back to on disk, the newest first; ``seen``: whether
    that was looked at since the last epoch was closed. ``struck``: paths of checkpoints that could
    not be loaded; ``why_struck``: the reason of the last one, as this coordinator knows it;
    ``doubted``: of the last one that is left, which gets another try. ``ever_ran``: whether an
    epoch was ever open. ``told``: the last iteration reported by the newest epoch that has reported
    any: it is behind ``newest`` after a return to an old checkpoint.
    """

    kept: Mapping[int, int] = field(default_factory=dict)
    newest: int = 0
    valid: tuple[records.Restore, ...] = ()
    seen: bool = False
    struck: frozenset[str] = frozenset()
    why_struck: str = ""
    doubted: str = ""
    ever_ran: bool = False
    told: records.Generation = NOTHING

    @property
    def durable(self) -> records.Restore | None:
        """The first of what the run can fall back to."""
        return next(iter(self.valid), None)

    def report(self, generation: records.Generation) -> None:
        """An iteration was reported."""
        self.newest = max(self.newest, generation.iteration)
        self.told = max(self.told, generation)

    def add_valid(self, restore: records.Restore) -> None:
        """A checkpoint became valid: whatever had its name was another."""
        k = restore.generation.iteration
        self.remove({restore.path})
        older = [one for one in self.valid if one.generation.iteration < k]
        newer = [one for one in self.valid if one not in older]
        self.valid, self.struck = (*newer, restore, *older), self.struck - {restore.path}

    def remove(self, paths: Collection[str]) -> None:
        """The checkpoints that have these paths do not count any more."""
        self.valid = tuple(one for one in self.valid if one.path not in paths)

    def doubt(self, path: str) -> bool:
        """The checkpoint at ``path`` could not be loaded: return whether it is struck off. The last
        one only at the second time: the fault may have been a device's."""
        if path != self.doubted and {one.path for one in self.valid} == {path}:
            self.doubted = path
            return False
        self.remove({path})
        is_new = path not in self.struck
        self.struck |= {path}
        return is_new

    def keeps(self, generation: records.Generation) -> bool:
        """Returns whether training continued from this generation, or may."""
        return is_kept(self.kept, generation)


@dataclass
class ChosenProtection:
    """``plan``: for the next record. ``why``: why it is another one than the last. ``told``: the
    one that was reported last."""

    plan: ProtectionPlan = field(default_factory=ProtectionPlan)
    why: str = ""
    told: ProtectionPlan | None = None


# Phases.


class Phase(StrEnum):
    """Names of the phases; every phase but RUNNING and ENDED has a deadline."""

    BOOTSTRAPPING = "bootstrapping"
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


@dataclass
class PauseOrder:
    """All members shall stand still after ``iteration``; ``leaving``: node to be drained."""

    iteration: int
    cause: str
    leaving: frozenset[int] = frozenset()
    paused: set[int] = field(default_factory=set)


@dataclass
class Bootstrapping:
    """Waits for the first members."""

    phase: ClassVar = Phase.BOOTSTRAPPING
    deadline: float


@dataclass
class Entering:
    """Roles are on their way into the epoch. ``restored``, ``done``: roles that have their state,
    or have completed their last iteration. ``begins``: the generation that the roles of an initial
    start have told. ``pause``: wanted as soon as the epoch runs."""

    deadline: float
    restored: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    begins: records.Generation | None = None
    pause: PauseOrder | None = None


@dataclass
class TakingOver(Entering):
    """A coordinator has taken over: the newest epoch continues while its agents come back.

    ``missed``: why it must be closed as soon as all are back. ``requests``: numbers of those that
    are over if it turns out that no process is left of before.
    """

    phase: ClassVar = Phase.BOOTSTRAPPING
    missed: Failure | None = None
    requests: frozenset[int] = frozenset()


@dataclass
class Closing:
    """Waits for the inventories of nodes, and for the end of killed members; ``looks``: for nothing
    any more but a look at the checkpoints."""

    phase: ClassVar = Phase.CLOSING
    deadline: float
    awaited: set[int] = field(default_factory=set)
    looks: bool = False


@dataclass
class WaitingSpare:
    """Waits for a node that joins."""

    phase: ClassVar = Phase.WAITING_SPARE
    deadline: float


@dataclass
class Deciding:
    """Waits for the journal. ``redecide``: why ``pending`` must not be announced any more."""

    phase: ClassVar = Phase.DECIDING
    deadline: float
    pending: records.EpochRecord
    redecide: Failure | None = None


@dataclass
class Opening(Entering):
    """Waits until every role has restored."""

    phase: ClassVar = Phase.OPENING


@dataclass
class Running:
    """All roles train. ``has_begun``: what had to wait for that was seen to; ``pause``: a part of
    it."""

    phase: ClassVar = Phase.RUNNING
    deadline: ClassVar[None] = None
    done: set[int] = field(default_factory=set)
    pause: PauseOrder | None = None
    has_begun: bool = False


@dataclass
class Pausing:
    """Runs, until all members stand still at one iteration."""

    phase: ClassVar = Phase.PAUSING
    deadline: float
    order: PauseOrder
    done: set[int] = field(default_factory=set)


@dataclass
class Dumping:
    """Nodes write to disk what they hold; then the run ends with ``words``.

    ``chains``: generations that are written in part, for roles that recompute their shard parts
    from them. ``held``: all that the nodes hold is written, as no generation is whole, else the one
    of ``restore``; a run continues from ``resume`` then, if there is one. ``failed``: nodes that
    could not write, and why, now or when another generation was tried before. ``damaged``: a node
    has found bytes damaged that it was counted on for. ``exporting``: all of it is written, and a
    checkpoint is being made of it.
    """

    phase: ClassVar = Phase.DUMPING
    deadline: float
    words: LastWords
    restore: records.Restore
    awaited: set[int]
    finished: set[int] = field(default_factory=set)
    chains: frozenset[records.Generation] = frozenset()
    held: bool = False
    resume: records.Restore | None = None
    failed: dict[int, str] = field(default_factory=dict)
    damaged: bool = False
    exporting: bool = False


@dataclass
class LeaveTaking:
    """Waits for the agents to go. ``unsaved``: why what they hold is in memory only, or lost; empty
    where it was written."""

    phase: ClassVar = Phase.ENDING
    deadline: float
    status: int
    unsaved: str = ""


@dataclass
class Ended:
    """There is nothing left to do."""

    phase: ClassVar = Phase.ENDED
    deadline: ClassVar[None] = None


# The epoch is open; its members are heard while agents come back, too.
Open = Opening | Running | Pausing
Heard = TakingOver | Open
PhaseObject = (
    Bootstrapping | Heard | Closing | WaitingSpare | Deciding | Dumping | LeaveTaking | Ended
)


@dataclass
class State:
    """Everything.

    ``seats``: of the last announced record, before that the wished ones. ``epoch``: highest number
    given to a record. ``record``: the last announced. ``restarted``: new agents have come to an
    epoch that was open; ``survived``: so have agents that were there before this coordinator.
    ``start``: see :class:`History`.
    ``last_words``: the run ends with them when its state is saved. ``early``: how far the program
    has come, where it ended before its last iteration. ``unsaved``: why its last checkpoint is not.
    ``requests``: of users, open or just ended. ``agreed``: what the nodes have in common, None
    until they are judged.
    """

    doing: PhaseObject
    seats: records.SeatTable
    epoch: int = 0
    record: records.EpochRecord | None = None
    fleet: Fleet = field(default_factory=Fleet)
    memory: Memory = field(default_factory=Memory)
    lineage: LineageProgress = field(default_factory=LineageProgress)
    blame: Blame = field(default_factory=Blame)
    protection: ChosenProtection = field(default_factory=ChosenProtection)
    recoveries: Recoveries = field(default_factory=Recoveries)
    restarted: bool = False
    survived: bool = False
    start: int = 0
    last_words: LastWords | None = None
    early: str = ""
    unsaved: str = ""
    requests: tuple[Request, ...] = ()
    agreed: Agreed | None = None

    @property
    def phase(self) -> Phase:
        """Name of the phase."""
        return self.doing.phase

    @property
    def open_epoch(self) -> int | None:
        """Number of the epoch in which members work, None while there is none."""
        return self.record.epoch if self.record and isinstance(self.doing, Open) else None

    @property
    def standing_epoch(self) -> int | None:
        """Number of the epoch whose saves count: the open one, and the newest while the run ends: a
        close for the end is none for a failure, and nobody writes in its place what it has written.
        """
        ends = self.last_words is not None or self.phase in LAST_PHASES
        return self.record.epoch if self.record is not None and ends else self.open_epoch

    @property
    def reporting_epoch(self) -> int | None:
        """Number of the epoch whose members are listened to: the open one, or after a takeover
        the newest, in which members work on while the agents come back.
        """
        return self.record.epoch if self.record and isinstance(self.doing, Heard) else None

    @property
    def reached(self) -> int:
        """The last iteration of the newest epoch that is known to be over."""
        if self.record is None:
            return 0
        begun, told = self.record.restore.generation.iteration, self.lineage.told
        return max(begun, told.iteration) if told.lineage == self.record.epoch else begun

    @property
    def is_restored(self) -> bool:
        """Return whether every role of the announced record has its state."""
        doing, roles = self.doing, 0 if self.record is None else len(self.record.seats)
        if isinstance(doing, Entering):
            return bool(roles) and len(doing.restored) == roles
        return bool(roles) and isinstance(doing, Running | Pausing)

    def role_at(self, node: int, local_rank: int, incarnation: int) -> int | None:
        """The role this very process has a seat for in the announced record."""
        return self.seats.role_of(node, local_rank, incarnation) if self.record else None

    def use_of(self, node: int) -> records.NodeUse:
        """The part that a connected node has; a quarantined one is that with a role, too."""
        fleet = self.fleet
        if node in fleet.quarantined | fleet.distrusted:
            return records.NodeUse.QUARANTINED
        if node in self.seats.nodes:
            return records.NodeUse.TRAINING
        judged = fleet.nodes[node].judged
        if node not in fleet.deprioritized or judged.eligibility is Eligibility.WEAK:
            return records.NodeUse.SPARE
        drains = [one for one in self.requests if one.verb is Verb.DRAIN]
        is_drained = any(one.what["node"] == node for one in drains)
        return records.NodeUse.DRAINED if is_drained else records.NodeUse.QUARANTINED

    def waiting_for(self) -> str:
        """Return what the phase waits for, in words; empty when it waits for nothing."""
        match self.doing:
            case Bootstrapping():
                return "nodes and their processes to start"
            case TakingOver():
                absent = [] if self.record is None else self.fleet.absent(self.record.nodes)
                return f"nodes {absent} to report to it"
            case Closing(looks=True):
                return "a look at the checkpoints"
            case Closing(awaited=awaited):
                members = self.fleet.having(MemberStatus.KILLED)
                told = f"nodes {sorted(awaited)} to say what they hold"
                return f"{told}, processes {members} to end" if members else told
            case WaitingSpare():
                returning = sorted(self.fleet.returning)
                back = f", or nodes {returning} with their slots" if returning else ""
                return f"a node that joins as spare{back}"
            case Deciding():
                return f"the journal of epoch {self.epoch}"
            case Opening(restored=restored):
                return f"restored from roles {sorted(set(self.seats) - restored)}"
            case Pausing(order=order, done=done):
                return f"roles {sorted(set(self.seats) - order.paused - done)} to pause"
            case Dumping(exporting=True, restore=restore):
                return f"the checkpoint of what was dumped to {restore.path}"
            case Dumping(awaited=awaited):
                return f"dumps of nodes {sorted(awaited)}"
            case LeaveTaking():
                return f"agents of nodes {sorted(self.fleet.nodes)} to go"
        return ""
