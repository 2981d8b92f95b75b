"""The handling of one input: the state so far, and the actions it has led to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.journal.requests import Request, Stage
from deadpool_megatron.cluster.machine.actions import Action, EmitEvent, KillMember, StartMembers
from deadpool_megatron.cluster.machine.inputs import OfMember, OfPlayer
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.fleet import MemberState, MemberStatus, Place
from deadpool_megatron.cluster.machine.state.phases import Doing, Open
from deadpool_megatron.cluster.machine.state.state import Config, State
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.planner import RestoreQuery
from deadpool_megatron.layout.records import BadPart, Seat


class Turn:
    """The handling of one input at time ``now`` (seconds, monotonic). Lives no longer than that."""

    def __init__(self, config: Config, state: State, now: float) -> None:
        self.config = config
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def enter(self, doing: Doing) -> None:
        """Go on with another phase, or with another state of this one."""
        self.state = self.state._replace(doing=doing)

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

    def change(self, request: Request) -> None:
        """Have a user's request in the place of the one with its number; tells of a new stage."""
        known = self.state.requests
        before = next(one for one in known if one.number == request.number)
        if before == request:
            return
        requests = tuple(request if one is before else one for one in known)
        self.state = self.state._replace(requests=requests)
        if before.stage is not request.stage:
            why = f": {request.why}" if request.why else ""
            text = f"request {request.number}, {request.in_words()}: {request.stage}{why}"
            self.log("warning" if request.stage is Stage.REFUSED else "info", text)

    def log(self, level: str, text: str, node: int | None = None) -> None:
        """Append a line for people."""
        self.emit(Kind.LOG, node=node, level=level, text=text)

    def refuse(self, who: str, why: str, node: int | None = None) -> None:
        """Report an input that changes nothing, because it is stale or makes no sense."""
        self.emit(Kind.REFUSED, node=node, who=who, why=why)

    def refuse_of(self, event: OfMember, why: str) -> None:
        """Report an input of a member that changes nothing."""
        process = f"{event.node}.{event.slot}.{event.incarnation}"
        self.refuse(f"{type(event).__name__} of member {process}", why, event.node)

    def is_present(self, event: OfMember) -> bool:
        """Return whether the process is the present one of its slot; refuses the input if it is
        not."""
        member = self.state.fleet.members.get((event.node, event.slot))
        if member is None or member.incarnation != event.incarnation:
            self.refuse_of(event, "not the present process of its slot")
            return False
        return True

    def player(self, event: OfPlayer) -> int | None:
        """Returns the role that the process plays in the epoch of which it speaks; None, and
        refuses the input, if it plays none there."""
        state = self.state
        if not self.is_present(event):
            return None
        role = state.role_at(event.node, event.slot, event.incarnation)
        if role is None:
            self.refuse_of(event, "it has no seat")
        elif event.epoch != state.heard_epoch:
            self.refuse_of(event, f"epoch {event.epoch} is not open")
            role = None
        return role

    def suspect(
        self,
        failure: Failure,
        bad_parts: frozenset[BadPart] = frozenset(),
        *,
        doubtful: bool = False,
    ) -> None:
        """Hold this against the epoch unless a better cause comes within half a second."""
        blame = self.state.blame.suspecting(failure, self.now, bad_parts, doubtful=doubtful)
        self.state = self.state._replace(blame=blame)

    def set_member(
        self, place: Place, status: MemberStatus, incarnation: int | None = None
    ) -> None:
        """Set status (and incarnation) of a member as of now."""
        if incarnation is None:
            incarnation = self.state.fleet.members[place].incarnation
        fleet = self.state.fleet.with_member(place, MemberState(incarnation, status, self.now))
        self.state = self.state._replace(fleet=fleet)

    def kill(self, place: Place, *, hung: bool = False) -> None:
        """Have a member killed, ``hung``: because it does not move; it is replaced when reaped."""
        member = self.state.fleet.members.get(place)
        if member is not None and member.status is not MemberStatus.KILLED:
            self.set_member(place, MemberStatus.KILLED)
            self.act(KillMember(*place, member.incarnation, hung))

    def start_members(self, node: int, slots: Mapping[int, int]) -> None:
        """Start processes (slot -> incarnation), told for which role to build."""
        roles = self.state.seats.role_by_place
        provisional = {
            slot: roles.get((node, slot), self.config.provisional_role(node, slot))
            for slot in slots
        }
        members = self.state.fleet.members
        for slot, incarnation in slots.items():
            starting = MemberState(incarnation, MemberStatus.STARTING, self.now)
            members = members.with_member((node, slot), starting)
        self.state = self.state._replace(fleet=replace(self.state.fleet, members=members))
        self.act(StartMembers(node, slots, provisional))

    def end_recovery(self) -> None:
        """The first iteration after a recovery is complete, or the run ends before it: report where
        the time went."""
        state, recovery = self.state, self.state.recoveries.current
        if recovery is None or state.record is None or not isinstance(state.doing, Open):
            return
        report = recovery.finish(state.record, self.now)
        self.state = state._replace(recoveries=state.recoveries.with_finished(report))
        self.emit(Kind.RECOVERED, **{k: v for k, v in report.to_dict().items() if k != "epoch"})

    def restore_query(self, seats: Mapping[int, Seat]) -> RestoreQuery:
        """Returns the question what the next epoch is restored from."""
        state, start, held = self.state, self.config.start, self.state.memory.held
        # A coordinator that has taken over knows of the first epoch only what memory shows.
        begins = state.line.is_empty and not state.memory.has_computed
        begins = begins or (self.config.from_scratch and state.restarted)
        return RestoreQuery(
            epoch=state.epoch + 1,
            world_size=self.config.world_size,
            inventories=held,
            seats=seats,
            owners=state.seats,
            kept=state.line.kept,
            layouts=state.memory.layouts,
            bad_parts=state.blame.bad_parts,
            bad_generations=state.blame.untrusted(held.values()),
            durable=next(iter(state.blame.trusted(state.line.valid)), None),
            start=start if start.kind == "initial" and begins else None,
            every=1 if state.record is None else state.record.protection.every,
        )
