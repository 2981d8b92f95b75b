"""The machine as each topic sees it: its state, the time of the current input, the actions so far.

Topics are modules of functions on a :class:`Core`. This module knows none of their rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.machine import state as states
from deadpool_megatron.cluster.machine.actions import Action, EmitEvent, KillMember, StartMembers
from deadpool_megatron.cluster.machine.inputs import FromRole, OfMember
from deadpool_megatron.events import Kind


class Core:
    """The machine while it handles an input. ``config``: the facts of the run. ``now``: when the
    input came (seconds, monotonic). ``actions``: the results of the input so far."""

    def __init__(self, config: states.Config, state: states.State, now: float) -> None:
        self.config, self.settings = config, config.settings
        self.state, self.now = state, now
        self.actions: list[Action] = []

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
        """Append an event; ``epoch`` defaults to the announced epoch."""
        if epoch is None:
            epoch = self.state.record.epoch if self.state.record else 0
        self.act(EmitEvent(kind, epoch, node=node, role=role, data=data))

    def log(self, level: str, text: str, node: int | None = None) -> None:
        """Append a log line for people."""
        self.emit(Kind.LOG, node=node, level=level, text=text)

    def refuse(self, subject: str, reason: str, node: int | None = None, **more: bool) -> None:
        """Report an input that changes nothing, because it is stale or makes no sense."""
        self.emit(Kind.REFUSED, node=node, who=subject, why=reason, **more)

    def refuse_of(self, event: OfMember, reason: str, **more: bool) -> None:
        """Report an input of a member that changes nothing."""
        process = f"{event.node}.{event.local_rank}.{event.incarnation}"
        self.refuse(f"{type(event).__name__} of member {process}", reason, event.node, **more)

    def not_open(self, epoch: int) -> dict[str, Any]:
        """Return the arguments with which :meth:`refuse` reports an input of ``epoch``: it is late,
        as after a failure, or wrong."""
        newest = 0 if self.state.record is None else self.state.record.epoch
        reason = f"epoch {epoch} is not open"
        return {"reason": reason, "late": True} if 0 < epoch <= newest else {"reason": reason}

    def is_present(self, event: OfMember) -> bool:
        """Return whether the sender is the current process of its place; refuse the input if it is
        not."""
        member = self.state.fleet.members.get(event.place)
        if member is None or member.incarnation != event.incarnation:
            self.refuse_of(event, "not the present process of its local rank", late=True)
            return False
        return True

    def sender_role(self, event: FromRole) -> int | None:
        """Return the role that a current process has in the epoch of its message; if it has none
        there, refuse the input and return None."""
        role = self.role_at(event)
        if role is None:
            self.refuse_of(event, "it has no seat")
        elif event.epoch != self.state.reporting_epoch:
            self.refuse_of(event, **self.not_open(event.epoch))
            role = None
        return role

    def role_at(self, event: OfMember) -> int | None:
        """Return the role for which exactly this process has a seat in the announced record."""
        return self.state.role_at(*event.place, event.incarnation)

    def set_member(
        self, place: states.Place, status: states.MemberStatus, incarnation: int | None = None
    ) -> None:
        """Set the status (and incarnation) of a member, as of now."""
        members = self.state.fleet.members
        if incarnation is None:
            incarnation = members[place].incarnation
        members[place] = states.MemberState(incarnation, status, self.now)

    def kill(self, place: states.Place, *, hung: bool = False) -> None:
        """Have a member killed; a new process replaces it when it is reaped. ``hung``: it makes no
        progress."""
        member = self.state.fleet.members.get(place)
        if member is not None and member.status is not states.MemberStatus.KILLED:
            self.set_member(place, states.MemberStatus.KILLED)
            self.act(KillMember(*place, member.incarnation, hung))

    def start_members(self, node: int, incarnations: Mapping[int, int]) -> None:
        """Start processes (local rank -> incarnation), each with a role to build for: the role of
        its seat, or a role whose stage class is likely to be needed."""
        seats, provisional = self.state.seats, {}
        for local_rank, incarnation in incarnations.items():
            place = (node, local_rank)
            likely = seats.roles[(node * self.config.nproc + local_rank) % len(seats)]
            provisional[local_rank] = seats.role_by_place.get(place, likely)
            self.set_member(place, states.MemberStatus.STARTING, incarnation)
        self.act(StartMembers(node, incarnations, provisional))
