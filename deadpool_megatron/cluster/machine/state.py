"""The state of the coordinator's state machine: data and look-ups, without decisions.

Each phase is an object with the data that is known only during that phase; the fields of the state
hold data that outlives a phase. Small sets are replaced by new sets. Sets of roles or members are
changed in place, as copies for every message of ten thousand members would cost quadratic time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from deadpool_megatron.cluster.journal.user_requests import Request, Verb
from deadpool_megatron.cluster.machine.blame import Blame, Failure, FinalStatus
from deadpool_megatron.cluster.machine.recoveries import Recoveries
from deadpool_megatron.layout import records
from deadpool_megatron.layout.planner import common_layouts, is_kept
from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.layout.sizes import SizeChanges, Sizes
from deadpool_megatron.preflight.eligibility import CommonFacts, Eligibility, HostFacts, Judgement
from deadpool_megatron.settings import Settings

NOTHING = records.Generation(0, 0)
INITIAL = records.Restore("initial", NOTHING)
Place = tuple[int, int]  # (node, local rank)


@dataclass(frozen=True)
class Config:
    """Facts of the run. Nodes 0 .. ``nodes`` - 1 are meant for training, the others are spares.

    ``start``: the state with which epoch 1 begins (kind initial, durable or dump); ``older``: the
    states to fall back to if that cannot be loaded. ``restarted``: all processes of the run had
    ended, and its agents start again; ``has_new_command``: a new command has started them, whose
    settings apply from now on. ``check_only``: the run ends when its nodes are judged.
    ``finished``: iterations finished before the start; ``from_scratch``: the run may begin at
    iteration 0 if their state is lost.
    """

    nodes: int
    spares: int
    nproc: int
    settings: Settings
    dump_directory: str
    start: records.Restore = INITIAL
    older: tuple[records.Restore, ...] = ()
    restarted: bool = False
    has_new_command: bool = False
    check_only: bool = False
    finished: int = 0
    from_scratch: bool = False

    @property
    def world_size(self) -> int:
        """Return the number of roles at full size."""
        return self.nodes * self.nproc


# Nodes and members.


class MemberStatus(StrEnum):
    """Status of a member process. A new incarnation replaces a lost process at once."""

    STARTING = "starting"
    RUNNING = "running"
    WARM = "warm"
    KILLED = "killed"  # ordered to end, not reaped yet


# A member that has not yet built its model.
BUILDING = (MemberStatus.STARTING, MemberStatus.RUNNING)


@dataclass(frozen=True)
class MemberState:
    """State of a member. ``since``: when it was started, became warm, or was killed (seconds)."""

    incarnation: int
    status: MemberStatus
    since: float


@dataclass
class NodeState:
    """A connected node. ``restarts``: how often a process had to be replaced on it.

    ``restarted_at`` and ``crashed_at``: times of replacements, and of crashes that ended an epoch,
    within the last ten minutes. ``host_errors``: errors of the device or memory in the whole run.
    ``memory_bytes``: memory for generations, 0 if not known. ``facts``: the latest report about the
    host, if any; ``judged``: the eligibility of the node. ``returns``: see
    :class:`.inputs.NodeJoined`.
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
        """Return the host name, which later nodes on the same host share; else the address."""
        return self.host if self.facts is None else self.facts.hostname


@dataclass
class Fleet:
    """Nodes and members. ``nodes``: connected nodes. ``removed``: nodes given up, with the cause.
    ``drains``: nodes whose roles are to move as soon as a spare can take them. A node whose roles
    have moved stays in it while other drains are open, so that it is no spare for them.
    ``draining``: nodes that lose their roles in the next record. ``deprioritized``: nodes that get
    a role last. ``distrusted``: nodes quarantined for crashes, slowness or their health, which get
    a role only if a failure leaves no other node. ``quarantined``: nodes that computed or held
    wrong numbers, or have a broken device, and never get a role again. ``quarantined_hosts``: hosts
    whose nodes are all quarantined; no later node there gets a role. ``returning``: nodes whose
    agents ended in this recovery, and may come back."""

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
    def poor_spares(self) -> frozenset[int]:
        """Return the nodes that get a role last, or never."""
        return self.deprioritized | self.quarantined

    def distrust(self, nodes: frozenset[int]) -> None:
        """Quarantine these nodes; a role on them stays until it is moved."""
        self.distrusted |= nodes
        self.deprioritized |= nodes

    def places_with(self, *statuses: MemberStatus) -> list[Place]:
        """Return the places of members with these statuses, in order."""
        return sorted(place for place, member in self.members.items() if member.status in statuses)

    def absent(self, nodes: Iterable[int]) -> list[int]:
        """Return those of ``nodes`` that are neither connected nor given up, ascending."""
        return sorted(node for node in nodes if node not in self.nodes and node not in self.removed)


@dataclass
class Memory:
    """Contents of the memory of the nodes, as far as reported. ``at_close``: inventories of
    the last close. ``at_join``: inventories of nodes that were not part of it, from their joins.
    ``layouts``: the layouts of the roles; ``inherited``: roles whose layout is known only from
    slots. ``sizes``: the sizes of the program, None as long as no member has reported any."""

    at_close: dict[int, records.Inventory] = field(default_factory=dict)
    at_join: dict[int, records.Inventory] = field(default_factory=dict)
    layouts: dict[int, records.RoleLayout] = field(default_factory=dict)
    inherited: frozenset[int] = frozenset()
    sizes: Sizes | None = None

    def add_sizes(self, sizes: Sizes | None) -> None:
        """Note the sizes that a member reports. The report with the fewest sizes counts, as the
        state of some roles may exclude a size."""
        present = self.sizes
        if sizes and (present is None or len(sizes.replicas) < len(present.replicas)):
            self.sizes = sizes

    @property
    def inventories(self) -> dict[int, records.Inventory]:
        """Return the inventories of live nodes: as promised at the close, else as found at the
        node's join."""
        return {**self.at_join, **self.at_close}

    @property
    def has_computed(self) -> bool:
        """Return whether memory holds a generation that an iteration has computed."""
        holdings = (each for inventory in self.inventories.values() for each in inventory.holdings)
        return any(holding.generation.iteration > 0 for holding in holdings)

    def in_slots(self, roles: Iterable[int]) -> dict[int, records.RoleLayout]:
        """Return the layouts, according to the slots, of the roles whose members have not yet
        reported a layout to this coordinator."""
        unknown = set(roles) - self.layouts.keys()
        return common_layouts(unknown, self.inventories.values()) if unknown else {}

    def drop_node(self, node: int) -> None:
        """Forget the inventories of a node."""
        self.at_close.pop(node, None)
        self.at_join.pop(node, None)


# The lineage of the run.


@dataclass
class LineageProgress:
    """Progress along the lineage. ``kept``: see layout.planner.keep_lineages. ``newest``: the last
    iteration that any epoch has reported. ``valid``: states on disk to fall back to, newest first;
    ``is_inspected``: whether they were inspected since the last epoch was closed.
    ``invalidated``: paths of checkpoints that could not be loaded; ``invalidation_reason``: the
    last reason, if this coordinator knows it; ``retried``: path of the only checkpoint left, which
    gets another try. ``ever_ran``: whether an epoch was ever open. ``reported``: the last iteration
    that the newest reporting epoch has reported; it is below ``newest`` after a return to an old
    checkpoint."""

    kept: Mapping[int, int] = field(default_factory=dict)
    newest: int = 0
    valid: tuple[records.Restore, ...] = ()
    is_inspected: bool = False
    invalidated: frozenset[str] = frozenset()
    invalidation_reason: str = ""
    retried: str = ""
    ever_ran: bool = False
    reported: records.Generation = NOTHING

    @property
    def durable(self) -> records.Restore | None:
        """Return the newest state on disk that the run can fall back to."""
        return next(iter(self.valid), None)

    def report(self, generation: records.Generation) -> None:
        """Note a reported iteration."""
        self.newest = max(self.newest, generation.iteration)
        self.reported = max(self.reported, generation)

    def add_valid(self, restore: records.Restore) -> None:
        """Add a checkpoint that became valid, in place of any earlier checkpoint with its path."""
        k = restore.generation.iteration
        self.remove({restore.path})
        older = [entry for entry in self.valid if entry.generation.iteration < k]
        newer = [entry for entry in self.valid if entry not in older]
        self.valid, self.invalidated = (*newer, restore, *older), self.invalidated - {restore.path}

    def remove(self, paths: Collection[str]) -> None:
        """Drop the checkpoints that have these paths."""
        self.valid = tuple(entry for entry in self.valid if entry.path not in paths)

    def invalidate(self, path: str) -> bool:
        """Note that the checkpoint at ``path`` could not be loaded. Return whether it is given up
        now: the only checkpoint left gets a second try, as a device may have been at fault."""
        if path != self.retried and {entry.path for entry in self.valid} == {path}:
            self.retried = path
            return False
        self.remove({path})
        is_new = path not in self.invalidated
        self.invalidated |= {path}
        return is_new

    def keeps(self, generation: records.Generation) -> bool:
        """Return whether training continued from this generation, or may."""
        return is_kept(self.kept, generation)


@dataclass
class ChosenProtection:
    """The chosen protection. ``plan``: the plan of the next record. ``reason``: why it differs from
    the plan before. ``reported``: the plan that was reported last."""

    plan: ProtectionPlan = field(default_factory=ProtectionPlan)
    reason: str = ""
    reported: ProtectionPlan | None = None


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
    """An order to all members to pause after ``iteration``. ``draining``: nodes that lose their
    roles then; ``paused``: roles that pause; ``grows``: a larger size is chosen then."""

    iteration: int
    cause: str
    draining: frozenset[int] = frozenset()
    paused: set[int] = field(default_factory=set)
    grows: bool = False


@dataclass
class Bootstrapping:
    """The wait for the first members."""

    phase: ClassVar = Phase.BOOTSTRAPPING
    deadline: float


@dataclass
class Entering:
    """The entry of roles into the epoch. ``restored``, ``done``: roles that have their state, or
    have completed their last iteration. ``begins``: the generation that the roles of an initial
    start have reported. ``pause``: an order that is sent as soon as the epoch runs."""

    deadline: float
    restored: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    begins: records.Generation | None = None
    pause: PauseOrder | None = None


@dataclass
class TakingOver(Entering):
    """The wait of a new coordinator: the newest epoch continues while its agents come back.

    ``missed``: the failure for which the epoch is closed as soon as all agents are back.
    ``requests``: numbers of the requests that are over unless an earlier process is still alive.
    """

    phase: ClassVar = Phase.BOOTSTRAPPING
    missed: Failure | None = None
    requests: frozenset[int] = frozenset()


@dataclass
class Closing:
    """The wait for the inventories of the nodes ``awaited``, and for the end of killed members.
    ``inspects``: only the inspection of the checkpoints is awaited."""

    phase: ClassVar = Phase.CLOSING
    deadline: float
    awaited: set[int] = field(default_factory=set)
    inspects: bool = False


@dataclass
class WaitingSpare:
    """The wait for a node that joins, which began at ``since``."""

    phase: ClassVar = Phase.WAITING_SPARE
    deadline: float
    since: float


@dataclass
class Deciding:
    """The wait for the journal. ``redecide``: why ``pending`` must not be announced any more."""

    phase: ClassVar = Phase.DECIDING
    deadline: float
    pending: records.EpochRecord
    redecide: Failure | None = None


@dataclass
class Opening(Entering):
    """The wait until every role has restored. ``since``: when this coordinator announced the epoch,
    or at the start of a run when the coordinator began; None after a takeover."""

    phase: ClassVar = Phase.OPENING
    since: float | None = None


@dataclass
class Running:
    """Training of all roles. ``has_begun``: whether the work that had to wait for this phase is
    done, such as to send the order ``pause``. ``deadline``: when the run grows to a larger size."""

    phase: ClassVar = Phase.RUNNING
    done: set[int] = field(default_factory=set)
    pause: PauseOrder | None = None
    has_begun: bool = False
    deadline: float | None = None


@dataclass
class Pausing:
    """Training until all members pause at one iteration."""

    phase: ClassVar = Phase.PAUSING
    deadline: float
    order: PauseOrder
    done: set[int] = field(default_factory=set)


@dataclass
class Dumping:
    """The write of the nodes' memory to disk; then the run ends with ``final``.

    ``writes_all``: the nodes write all their generations, not only that of ``restore``, as no
    generation is whole; ``resume`` is then the state to continue from, if any. ``failed``: node ->
    error of nodes that could not write this generation, or another before. ``damaged``: a node has
    found damaged bytes in parts on which the planner relied. ``exporting``: all is written, and is
    being exported as a checkpoint. ``roles``: the roles of the generation.
    """

    phase: ClassVar = Phase.DUMPING
    deadline: float
    final: FinalStatus
    restore: records.Restore
    awaited: set[int]
    finished: set[int] = field(default_factory=set)
    writes_all: bool = False
    resume: records.Restore | None = None
    failed: dict[int, str] = field(default_factory=dict)
    damaged: bool = False
    exporting: bool = False
    roles: tuple[int, ...] = ()


@dataclass
class Ending:
    """The wait for the agents to leave. ``unsaved``: why the state of the run is only in memory, or
    lost; empty if it was written."""

    phase: ClassVar = Phase.ENDING
    deadline: float
    status: int
    unsaved: str = ""


@dataclass
class Ended:
    """The end: there is nothing left to do."""

    phase: ClassVar = Phase.ENDED
    deadline: ClassVar[None] = None


# The epoch is open. Its members' reports also count while agents come back.
Open = Opening | Running | Pausing
Reporting = TakingOver | Open
PhaseObject = (
    Bootstrapping | Reporting | Closing | WaitingSpare | Deciding | Dumping | Ending | Ended
)


@dataclass
class State:
    """All knowledge of the machine.

    ``seats``: the seats of the last announced record, or the planned seats before there is a
    record. ``epoch``: highest number given to a record. ``record``: the last announced record.
    ``restarted``: new agents have joined an epoch that was open; ``survived``: agents that are
    older than this coordinator have joined too. ``start``, ``changes``: see :class:`History`.
    ``began``: when this coordinator began. ``grows``: the next record may be of a larger size.
    ``final``: how the run ends once its state is saved. ``early``: how far the program came, if it
    ended before its last iteration. ``unsaved``: why its last checkpoint is not valid.
    ``requests``: open requests of users, and some that have ended. ``agreed``: properties that the
    nodes share, None until the nodes are judged.
    """

    phase_state: PhaseObject
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
    changes: SizeChanges = field(default_factory=SizeChanges)
    began: float = 0.0
    grows: bool = False
    final: FinalStatus | None = None
    early: str = ""
    unsaved: str = ""
    requests: tuple[Request, ...] = ()
    agreed: CommonFacts | None = None

    @property
    def phase(self) -> Phase:
        """Return the name of the phase."""
        return self.phase_state.phase

    @property
    def open_epoch(self) -> int | None:
        """Return the number of the epoch in which members work, None while there is none."""
        return self.record.epoch if self.record and isinstance(self.phase_state, Open) else None

    @property
    def standing_epoch(self) -> int | None:
        """Return the number of the epoch whose saves count: the open epoch, or the newest epoch
        while the run ends. No failure closed that epoch, and nothing overwrites its saves."""
        ends = self.final is not None or self.phase in LAST_PHASES
        return self.record.epoch if self.record is not None and ends else self.open_epoch

    @property
    def reporting_epoch(self) -> int | None:
        """Return the number of the epoch whose members' reports count: the open epoch, or after a
        takeover the newest epoch, in which members continue while the agents come back."""
        return (
            self.record.epoch if self.record and isinstance(self.phase_state, Reporting) else None
        )

    @property
    def reached(self) -> int:
        """Return the last iteration known to be complete in the newest epoch."""
        if self.record is None:
            return 0
        begun, reported = self.record.restore.generation.iteration, self.lineage.reported
        return max(begun, reported.iteration) if reported.lineage == self.record.epoch else begun

    @property
    def is_changing(self) -> bool:
        """Return whether the number of roles has changed and no iteration was completed since."""
        return self.record is not None and self.changes.trained != len(self.record.seats)

    @property
    def is_restored(self) -> bool:
        """Return whether every role of the announced record has its state."""
        phase_state, roles = self.phase_state, 0 if self.record is None else len(self.record.seats)
        if isinstance(phase_state, Entering):
            return bool(roles) and len(phase_state.restored) == roles
        return bool(roles) and isinstance(phase_state, Running | Pausing)

    def role_at(self, node: int, local_rank: int, incarnation: int) -> int | None:
        """Return the role for which exactly this process has a seat in the announced record."""
        return self.seats.role_of(node, local_rank, incarnation) if self.record else None

    def use_of(self, node: int) -> records.NodeUse:
        """Return the use of a connected node. A quarantined node counts as quarantined even while
        it has a role."""
        fleet = self.fleet
        if node in fleet.quarantined | fleet.distrusted:
            return records.NodeUse.QUARANTINED
        if node in self.seats.nodes:
            return records.NodeUse.TRAINING
        judged = fleet.nodes[node].judged
        if node not in fleet.deprioritized or judged.eligibility is Eligibility.WEAK:
            return records.NodeUse.SPARE
        drains = [request for request in self.requests if request.verb is Verb.DRAIN]
        is_drained = any(request.content["node"] == node for request in drains)
        return records.NodeUse.DRAINED if is_drained else records.NodeUse.QUARANTINED

    def waiting_for(self) -> str:
        """Return what the phase waits for, as text; empty when it waits for nothing."""
        match self.phase_state:
            case Bootstrapping():
                return "nodes and their processes to start"
            case TakingOver():
                absent = [] if self.record is None else self.fleet.absent(self.record.nodes)
                return f"nodes {absent} to report to it"
            case Closing(inspects=True):
                return "a look at the checkpoints"
            case Closing(awaited=awaited):
                members = self.fleet.places_with(MemberStatus.KILLED)
                text = f"nodes {sorted(awaited)} to say what they hold"
                return f"{text}, processes {members} to end" if members else text
            case WaitingSpare():
                returning = sorted(self.fleet.returning)
                back = f", or nodes {returning} with their slots" if returning else ""
                return f"a node that joins as spare{back}"
            case Deciding():
                return f"the journal of epoch {self.epoch}"
            case Opening(restored=restored):
                return f"restored from roles {sorted(map(rank_of, set(self.seats) - restored))}"
            case Pausing(order=order, done=done):
                awaited = set(self.seats) - order.paused - done
                return f"roles {sorted(map(rank_of, awaited))} to pause"
            case Dumping(exporting=True, restore=restore):
                return f"the checkpoint of what was dumped to {restore.path}"
            case Dumping(awaited=awaited):
                return f"dumps of nodes {sorted(awaited)}"
            case Ending():
                return f"agents of nodes {sorted(self.fleet.nodes)} to go"
        return ""
