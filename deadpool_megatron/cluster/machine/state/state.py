"""What the coordinator's state machine knows: immutable, and nothing else decides what it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from immutables import Map

from deadpool_megatron.cluster.journal.requests import Request
from deadpool_megatron.cluster.machine.state.blame import Failure, Suspicion
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.cluster.machine.state.phases import (
    OPEN_PHASES,
    DumpOrder,
    LastWords,
    PauseOrder,
    Phase,
)
from deadpool_megatron.cluster.machine.state.recoveries import Recovery, RecoveryReport
from deadpool_megatron.cluster.machine.state.roster import NodeState, Roster
from deadpool_megatron.layout.decision import BadPart
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    Inventory,
    Restore,
    RoleLayout,
)
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.layout.seats import SeatTable
from deadpool_megatron.preflight.judge import Agreed
from deadpool_megatron.preflight.schedule import Checkup


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


def is_poisoned(state: State, restore: Restore) -> bool:
    """Whether nothing of ``restore`` may be used, as a loss was not finite by then."""
    limit = state.poisoned_from
    return limit is not None and restore.generation.iteration >= limit


def poisoned_generations(state: State) -> frozenset[Generation]:
    """What nodes hold of an iteration whose loss was not finite, and of later ones."""
    limit = state.poisoned_from
    if limit is None:
        return frozenset()
    held = (h.generation for i in state.held.values() for h in i.holdings)
    return frozenset(generation for generation in held if generation.iteration >= limit)
