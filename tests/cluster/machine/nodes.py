"""What a simulated node has: a vault, members, and a queue in each direction."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    Seat,
)
from tests.cluster.machine.rig import STEP

SLOTS = 2


# A role and the parts that are held of it.
Held = tuple[int, frozenset[str]]


@dataclass
class Vault:
    """Sealed generations by role (own, copies and parity), and which epoch may add to them."""

    held: dict[Held, set[Generation]] = field(default_factory=dict)
    epoch: int = 0
    frozen: bool = True
    promised: dict[Held, frozenset[Generation]] = field(default_factory=dict)

    def seal(self, role: int, generation: Generation, parts: frozenset[str] = STEP) -> None:
        """Keeps the newest SLOTS: never the newest is overwritten, of the others the oldest."""
        assert not self.frozen
        kept = self.held.setdefault((role, parts), set()) | {generation}
        self.held[role, parts] = set(sorted(kept)[-SLOTS:])

    def has(self, role: int, generation: Generation, parts: frozenset[str]) -> bool:
        return generation in self.held.get((role, parts), ())

    def gives(self, role: int, generation: Generation, part: str) -> bool:
        return any(
            of == role and part in parts and generation in kept
            for (of, parts), kept in self.held.items()
        )

    def close(self, epoch: int) -> None:
        self.frozen = True
        self.promised = {role: frozenset(kept) for role, kept in self.held.items()}
        self.epoch = max(self.epoch, epoch)

    def adopt(self, record: EpochRecord) -> None:
        # Rule 3: between its inventory and the next record a vault changes nothing.
        if self.frozen and self.promised:
            assert self.promised == {role: frozenset(kept) for role, kept in self.held.items()}
        newest = record.restore.generation if record.restore.kind == "memory" else None
        for role, kept in self.held.items():
            self.held[role] = {one for one in kept if newest is not None and one <= newest}
        self.epoch, self.frozen, self.promised = record.epoch, False, {}


@dataclass
class Member:
    """A live process. ``at``: the generation its state is, None before it restored; ``kept``: the
    newest one that is protected.

    ``said``: its newest report of each kind, which its agent repeats to a new coordinator.
    """

    seat: Seat
    epoch: int = 0
    role: int | None = None
    at: Generation | None = None
    kept: Generation | None = None
    entered: int = 0  # the iteration whose collective it has passed
    pause_at: int | None = None
    paused: bool = False
    said: dict[type[ev.Input], ev.OfMember] = field(default_factory=dict)


@dataclass
class Node:
    """An agent with its vault, its members and its two queues.

    ``epoch``: of the record that it follows; ``closed``: the newest epoch it has closed; ``moved``:
    it has not had the welcome of the present coordinator yet.
    """

    vault: Vault = field(default_factory=Vault)
    members: dict[int, Member] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    orders: deque[act.Action] = field(default_factory=deque)
    reports: deque[ev.Input] = field(default_factory=deque)
    epoch: int = 0
    closed: int = 0
    moved: bool = False

    def say(self, *reports: ev.OfMember) -> None:
        """Report something about members."""
        for report in reports:
            self.members[report.slot].said[type(report)] = report
            self.reports.append(report)

    def join(self, number: int) -> ev.NodeJoined:
        """The first message on a new connection."""
        restored = {
            slot: said.epoch
            for slot, member in self.members.items()
            if isinstance(said := member.said.get(ev.Restored), ev.Restored)
        }
        return ev.NodeJoined(
            number,
            "host",
            number,
            f"node{number}",
            {slot: member.seat.incarnation for slot, member in self.members.items()},
            dict(self.incarnations),
            self.epoch,
            self.closed,
            restored,
        )
