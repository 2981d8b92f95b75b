"""A machine under test with a hand-turned clock: inputs in, actions recorded."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any, TypeVar

from deadpool_megatron.cluster.machine import actions as act, inputs as ev, state as states
from deadpool_megatron.cluster.machine.machine import NO_NODES, Machine
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.events import Kind, to_line
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    Holding,
    Inventory,
    PartInfo,
    Restore,
    RoleLayout,
    Seat as Seat,
)
from deadpool_megatron.settings import Settings
from tests.common.event_schema import check_event

A = TypeVar("A", bound=act.Action)
STEP = frozenset({"main", "extras@step"})
SIGKILL = 9
main_bytes = 8  # bytes of a shard


def layout(role: int, world: int, *, layout_hash: str = "") -> RoleLayout:
    parts = (PartInfo("main", main_bytes, (role,)), PartInfo("extras@step", 8, (role,)))
    peers = tuple(range(world))
    return RoleLayout(role, parts, peers, 2, layout_hash or f"hash{role}")


def plain(value: Any) -> Any:
    """A value as JSON has it, with sets in order."""
    if isinstance(value, float):
        return round(value, 6)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


class Rig:
    """Nodes 0 .. nodes-1 train, the others are spares; role r starts on node r // nproc."""

    def __init__(self, nodes: int = 2, spares: int = 1, nproc: int = 1, **settings: Any) -> None:
        start = settings.pop("start", states.INITIAL)
        self.settings = Settings(**settings)
        self.config = states.Config(nodes, spares, nproc, self.settings, "/dump", start)
        self.now = 100.0
        self.machine = Machine(self.config, self.now)
        self.last: list[act.Action] = []
        self.log: list[act.Action] = []
        self.gone = frozenset[str]()  # checkpoints that were removed

    @property
    def state(self) -> states.State:
        return self.machine.state

    # Driving.

    def successor(
        self, *valid: Restore, removed: Mapping[int, str] = NO_NODES, **config: Any
    ) -> Rig:
        """The next coordinator, with every record that was written; no agent has come yet.
        ``removed``: nodes given up since, from the journal."""
        records = [write.record for write in self.of(act.WriteRecord, self.log)]
        rig = copy.copy(self)
        rig.config = replace(self.config, **config)
        rig.take_over(records[-1], valid, removed=removed)
        rig.last, rig.log = [], []
        return rig

    def take_over(
        self, record: EpochRecord, valid: Sequence[Restore] = (), **more: Any
    ) -> states.State:
        """As a coordinator that finds this record."""
        self.machine = Machine(self.config, self.now)
        self.machine.take_over(record, valid, **more)
        return self.state

    def feed(self, *events: ev.Input) -> list[act.Action]:
        """Feed inputs; the actions of this call are in ``last`` too."""
        self.last = []
        fed = [*events]
        while fed:
            actions = self.machine.handle(fed.pop(0), self.now)
            self.last += actions
            if any(isinstance(action, act.InspectCheckpoints) for action in actions):
                fed.insert(0, ev.CheckpointsFound(self.gone))
        for emitted in self.of(act.EmitEvent):
            check_event(json.loads(to_line(emitted.to_event())))
        self.log += self.last
        return self.last

    def tick(self, seconds: float) -> list[act.Action]:
        self.now += seconds
        return self.feed(ev.Tick())

    def of(self, kind: type[A], actions: Iterable[act.Action] | None = None) -> list[A]:
        """Return the actions of one type, by default of the last call."""
        return [a for a in (self.last if actions is None else actions) if isinstance(a, kind)]

    def only(self, kind: type[A]) -> A:
        (found,) = self.of(kind)
        return found

    def emitted(self, kind: Kind) -> list[act.EmitEvent]:
        return [a for a in self.of(act.EmitEvent) if a.kind is kind]

    # Whole stretches.

    def join(self, *nodes: int) -> None:
        self.feed(*(ev.NodeJoined(n, "host", 1000 + n, f"node{n}") for n in nodes))

    def hello(self, *nodes: int) -> None:
        self._report(ev.MemberHello, nodes)

    def warm(self, *nodes: int) -> None:
        self._report(ev.MemberWarm, nodes)

    def _report(self, kind: type[ev.MemberHello | ev.MemberWarm], nodes: tuple[int, ...]) -> None:
        """Report this of every member of these nodes."""
        members = sorted(self.state.fleet.members.items())
        self.feed(
            *(kind(*place, member.incarnation) for place, member in members if place[0] in nodes)
        )

    def reap(self) -> None:
        """Start members again that were killed to serve as fresh spares."""
        members = self.state.fleet.members
        places = [*self.state.fleet.places_with(states.MemberStatus.KILLED)]
        for place in places:
            self.feed(ev.MemberLost(*place, members[place].incarnation, signal=SIGKILL))
        nodes = {node for node, _ in places}
        self.hello(*nodes)
        self.warm(*nodes)

    def gather(self) -> None:
        """Let all nodes join and their members start: DECIDING epoch 1."""
        nodes = range(self.config.nodes + self.config.spares)
        self.join(*nodes)
        self.hello(*nodes)

    def journal(self) -> list[act.Action]:
        return self.feed(ev.JournalWritten(self.state.epoch))

    def seat(self, role: int) -> tuple[int, int, int]:
        node, local_rank, incarnation = self.record.seats[role].to_list()
        return node, local_rank, incarnation

    def restored(self, *roles: int) -> list[act.Action]:
        """The members of these roles (default: all) register and restore."""
        record, world = self.record, self.config.world_size
        chosen = roles or tuple(record.seats)
        return self.feed(
            *(ev.MemberRegistered(*self.seat(r), layout(r, world)) for r in chosen),
            *(ev.Restored(*self.seat(r), record.epoch, record.restore.generation) for r in chosen),
        )

    def opening(self) -> Rig:
        """From nothing to OPENING epoch 1."""
        self.gather()
        self.journal()
        return self

    def opened(self) -> list[act.Action]:
        """The pending record becomes durable, and all of its members restore."""
        self.journal()
        return self.restored()

    def run(self, iteration: int | None = None) -> Rig:
        """From nothing to RUNNING epoch 1, with warm spares; then up to an iteration."""
        self.opening().restored()
        self.warm(*range(self.config.nodes, self.config.nodes + self.config.spares))
        assert self.state.phase is Phase.RUNNING
        if iteration is not None:
            self.steps(iteration)
        return self

    def steps(self, iteration: int) -> list[act.Action]:
        return self.feed(ev.StepReported(self.record.epoch, iteration))

    def inventory(self, node: int, *generations: Generation) -> ev.NodeInventory:
        """Return the inventory of ``node``: these generations of its roles and owed copies."""
        record, world = self.record, self.config.world_size
        copies = CopyPlacement.of_record(record)
        held = [
            role
            for role, seat in record.seats.items()
            if seat.node == node or node in copies.buddies(role, tuple(range(world)))
        ]
        holdings = tuple(Holding(role, g, STEP) for role in held for g in generations)
        layouts = tuple(layout(role, world) for role in held)
        return ev.NodeInventory(Inventory(node, record.epoch, holdings, layouts))

    def closed(self, *generations: Generation, nodes: Iterable[int] | None = None) -> None:
        """The awaited nodes (or these) answer the close."""
        chosen = sorted(self.awaited) if nodes is None else list(nodes)
        self.feed(*(self.inventory(node, *generations) for node in chosen))

    def lose(self, node: int, *held: Generation, reason: str = "gone") -> None:
        """A node is lost; the others close the epoch, in which they hold these generations."""
        self.feed(ev.NodeLost(node, reason))
        self.closed(*held)

    def kill(self, role: int, *held: Generation) -> None:
        """The member of a role is killed; all close the epoch."""
        self.feed(killed(self, role))
        self.closed(*held)

    def decided(self, *held: Generation) -> None:
        """Close the epoch, and journal the next."""
        self.closed(*held)
        self.journal()

    def reopened(self, *held: Generation) -> None:
        """Close the epoch, and open the next."""
        self.closed(*held)
        self.opened()

    def saved_end(self, *generations: Generation) -> act.Finish:
        """The end that was begun: the close is answered, the newest generation is dumped."""
        self.closed(*generations)
        dump = self.only(act.Dump)
        self.feed(*(ev.Dumped(node, dump.generation) for node in dump.nodes))
        finish = self.only(act.Finish)
        assert finish.resume is not None
        assert finish.resume == Restore("dump", dump.generation, dump.boundary, dump.directory)
        assert f"state dumped to {dump.directory}: continue with 'deadpool run" in finish.reason
        return finish

    @property
    def record(self) -> EpochRecord:
        assert self.state.record is not None
        return self.state.record

    @property
    def pending(self) -> EpochRecord:
        assert isinstance(self.state.phase_state, states.Deciding)
        return self.state.phase_state.pending

    @property
    def awaited(self) -> Set[int]:
        """Nodes that still have to answer the close."""
        return (
            self.state.phase_state.awaited
            if isinstance(self.state.phase_state, states.Closing)
            else set()
        )

    def show(self) -> None:
        """Print the actions of the last call, the decision in a record, and the phase."""
        for action in self.last:
            values = {key: value for key, value in vars(action).items() if value or value == 0}
            if (record := values.get("record")) is not None:
                restore = str(record.restore.generation.to_list())[1:-1]
                seats = {role: str(seat.to_list()) for role, seat in record.seats.items()}
                values["record"] = f"{record.epoch} {seats} {record.restore.kind} {restore}"
                values["record"] += f" without {sorted(record.fewer_copies)} {sorted(record.nodes)}"
            text = json.dumps(plain(values), sort_keys=True, default=str)
            print(type(action).__name__, text.replace('"', ""))
        print(f"{self.state.phase}: {self.state.waiting_for()}".strip(": "))

    def alter(self, part: str, **changes: object) -> None:
        """Other values in one part of the state, such as ``fleet``."""
        for name, value in changes.items():
            setattr(getattr(self.state, part), name, value)

    def alter_nodes(self, **changes: object) -> None:
        """Other values of every node that is connected."""
        for name, value in changes.items():
            for known in self.state.fleet.nodes.values():
                setattr(known, name, value)


def g(iteration: int, lineage: int = 1) -> Generation:
    return Generation(lineage, iteration)


def killed(rig: Rig, role: int, number: int = SIGKILL) -> ev.MemberLost:
    return ev.MemberLost(*rig.seat(role), signal=number)


def nodes_of(record: EpochRecord) -> dict[int, int]:
    return {role: seat.node for role, seat in record.seats.items()}
