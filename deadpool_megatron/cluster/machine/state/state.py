"""Knowledge of the coordinator's state machine: immutable, and nothing else decides what it
does."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from deadpool_megatron.cluster.journal.requests import Request
from deadpool_megatron.cluster.machine.state import phases
from deadpool_megatron.cluster.machine.state.blame import Blame, LastWords
from deadpool_megatron.cluster.machine.state.fleet import Fleet
from deadpool_megatron.cluster.machine.state.line import ChosenProtection, KeptLine
from deadpool_megatron.cluster.machine.state.memory import Memory
from deadpool_megatron.cluster.machine.state.recoveries import Recoveries
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, SeatTable
from deadpool_megatron.preflight.judge import Agreed, Checkup
from deadpool_megatron.settings import Settings

INITIAL = Restore("initial", Generation(0, 0))


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
    start: Restore = INITIAL
    older: tuple[Restore, ...] = ()
    restarted: bool = False
    begins_anew: bool = False
    check_only: bool = False
    finished: int = 0
    from_scratch: bool = False

    @property
    def world_size(self) -> int:
        """Number of roles."""
        return self.nodes * self.nproc

    def provisional_role(self, node: int, slot: int) -> int:
        """The role a member builds for before it has a seat: its stage class is likely needed."""
        return (node % self.nodes) * self.nproc + slot


class State(NamedTuple):
    """Everything. A tuple, because another one is made for nearly every message, and that is three
    times the work with a frozen dataclass of so many fields.

    ``seats``: of the last announced record, before that the wished ones. ``epoch``: highest number
    given to a record. ``record``: the last announced. ``restarted``: new agents have come to an
    epoch that was open; ``survived``: so have agents that were there before this coordinator.
    ``last_words``: the run ends with them when its state is saved. ``early``: how far the program
    has come, where it ended before its last iteration. ``unsaved``: why its last checkpoint is not.
    ``requests``: of users, open or just ended. ``agreed``: what the nodes have in common, None
    until they are judged.
    """

    doing: phases.Doing
    seats: SeatTable
    epoch: int = 0
    record: EpochRecord | None = None
    fleet: Fleet = Fleet()
    memory: Memory = Memory()
    line: KeptLine = KeptLine()
    blame: Blame = Blame()
    protection: ChosenProtection = ChosenProtection()
    recoveries: Recoveries = Recoveries()
    restarted: bool = False
    survived: bool = False
    last_words: LastWords | None = None
    early: str = ""
    unsaved: str = ""
    requests: tuple[Request, ...] = ()
    agreed: Agreed | None = None

    @property
    def phase(self) -> phases.Phase:
        """Name of the phase."""
        return self.doing.phase

    @property
    def deadline(self) -> float | None:
        """Return when the phase has taken long enough; None where it may last."""
        return self.doing.deadline

    @property
    def open_epoch(self) -> int | None:
        """Number of the epoch in which members work, None while there is none."""
        return self.record.epoch if self.record and isinstance(self.doing, phases.Open) else None

    @property
    def standing_epoch(self) -> int | None:
        """Number of the epoch whose saves count: the open one, and the newest while the run ends: a
        close for the end is none for a failure, and nobody writes in its place what it has written.
        """
        ends = self.last_words is not None or self.phase in phases.LAST_PHASES
        return self.record.epoch if self.record is not None and ends else self.open_epoch

    @property
    def heard_epoch(self) -> int | None:
        """Number of the epoch whose members are listened to: the open one, or after a takeover
        the newest, in which members work on while the agents come back.
        """
        return self.record.epoch if self.record and isinstance(self.doing, phases.Heard) else None

    @property
    def reached(self) -> int:
        """The last iteration of the newest epoch that is known to be over."""
        if self.record is None:
            return 0
        begun, told = self.record.restore.generation.iteration, self.line.told
        return max(begun, told.iteration) if told.lineage == self.record.epoch else begun

    @property
    def restored(self) -> Set[int]:
        """Roles of the heard epoch that have their state."""
        match self.doing:
            case phases.Rejoining(restored=restored) | phases.Opening(restored=restored):
                return restored
            case phases.Running() | phases.Pausing():
                return self.seats.keys()
        return frozenset()

    @property
    def is_restored(self) -> bool:
        """Return whether every role of the announced record has its state."""
        return self.record is not None and len(self.restored) == len(self.record.seats)

    def role_at(self, node: int, slot: int, incarnation: int) -> int | None:
        """The role this very process has a seat for in the announced record."""
        return self.seats.role_of(node, slot, incarnation) if self.record else None

    def waiting_for(self) -> str:
        """Return what the phase waits for, in words; empty when it waits for nothing."""
        match self.doing:
            case phases.Gathering(checkup=Checkup(awaited=awaited)):
                return f"links of nodes {sorted(awaited)} to be measured"
            case phases.Gathering() | phases.Rejoining():
                return "nodes and members to start"
            case phases.Closing(looks=True):
                return "a look at the checkpoints"
            case phases.Closing(awaited=awaited):
                members = sorted(self.fleet.members.killed)
                return f"inventories of nodes {sorted(awaited)}, end of members {members}"
            case phases.WaitingSpare():
                returning = sorted(self.fleet.returning)
                back = f", or nodes {returning} with their slots" if returning else ""
                return f"a node that joins as spare{back}"
            case phases.Deciding():
                return f"the journal of epoch {self.epoch}"
            case phases.Opening(restored=restored):
                return f"restored from roles {sorted(set(self.seats) - restored)}"
            case phases.Pausing(order=order, done=done):
                return f"roles {sorted(set(self.seats) - order.paused - done)} to pause"
            case phases.Dumping(exporting=True, restore=restore):
                return f"the checkpoint of what was dumped to {restore.path}"
            case phases.Dumping(awaited=awaited):
                return f"dumps of nodes {sorted(awaited)}"
            case phases.Ending():
                return f"agents of nodes {sorted(self.fleet.nodes)} to go"
        return ""
