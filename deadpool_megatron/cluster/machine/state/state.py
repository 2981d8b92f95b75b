"""What the coordinator's state machine knows: immutable, and nothing else decides what it does."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from deadpool_megatron.cluster.journal.requests import Request
from deadpool_megatron.cluster.machine.state.blame import Blame
from deadpool_megatron.cluster.machine.state.causes import LastWords
from deadpool_megatron.cluster.machine.state.choice import ChosenProtection
from deadpool_megatron.cluster.machine.state.fleet import Fleet
from deadpool_megatron.cluster.machine.state.line import KeptLine
from deadpool_megatron.cluster.machine.state.memory import Memory
from deadpool_megatron.cluster.machine.state.phases import (
    Closing,
    Deciding,
    Doing,
    Dumping,
    Ending,
    Gathering,
    Heard,
    Open,
    Opening,
    Pausing,
    Phase,
    Rejoining,
    Running,
    WaitingSpare,
)
from deadpool_megatron.cluster.machine.state.recoveries import Recoveries
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.layout.seats import SeatTable
from deadpool_megatron.preflight.judge import Agreed
from deadpool_megatron.preflight.schedule import Checkup


class State(NamedTuple):
    """Everything. A tuple, because another one is made for nearly every message, and that is three
    times the work with a frozen dataclass of so many fields.

    ``seats``: of the last announced record, before that the wished ones. ``epoch``: highest number
    given to a record. ``record``: the last announced. ``restarted``: new agents have come to an
    epoch that was open. ``last_words``: the run ends with them when its state is saved.
    ``requests``: of users, open or just ended. ``agreed``: what the nodes have in common, None
    until they are judged.
    """

    doing: Doing
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
    last_words: LastWords | None = None
    requests: tuple[Request, ...] = ()
    agreed: Agreed | None = None

    @property
    def phase(self) -> Phase:
        """Name of the phase."""
        return self.doing.phase

    @property
    def deadline(self) -> float | None:
        """When the phase has taken long enough; None where it may last."""
        return self.doing.deadline

    @property
    def open_epoch(self) -> int | None:
        """Number of the epoch in which members work, None while there is none."""
        return self.record.epoch if self.record and isinstance(self.doing, Open) else None

    @property
    def heard_epoch(self) -> int | None:
        """Number of the epoch whose members are listened to: the open one, or after a takeover
        the newest, in which members go on working while the agents come back.
        """
        return self.record.epoch if self.record and isinstance(self.doing, Heard) else None

    @property
    def restored(self) -> Set[int]:
        """Roles of the heard epoch that have their state."""
        match self.doing:
            case Rejoining(restored=restored) | Opening(restored=restored):
                return restored
            case Running() | Pausing():
                return self.seats.keys()
        return frozenset()

    @property
    def is_restored(self) -> bool:
        """Whether every role of the announced record has its state."""
        return self.record is not None and len(self.restored) == len(self.record.seats)

    def role_at(self, node: int, slot: int, incarnation: int) -> int | None:
        """The role this very process has a seat for in the announced record."""
        return self.seats.role_of(node, slot, incarnation) if self.record else None

    def waiting_for(self) -> str:
        """What the phase waits for, in words; empty when it waits for nothing."""
        match self.doing:
            case Gathering(checkup=Checkup(awaited=awaited)):
                return f"links of nodes {sorted(awaited)} to be measured"
            case Gathering() | Rejoining():
                return "nodes and members to start"
            case Closing(awaited=awaited):
                members = sorted(self.fleet.members.killed)
                return f"inventories of nodes {sorted(awaited)}, end of members {members}"
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
            case Ending():
                return f"agents of nodes {sorted(self.fleet.nodes)} to go"
        return ""
