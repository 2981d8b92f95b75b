"""Reports to the coordinator on the members of this node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from deadpool_megatron.cluster.agent.members.members import Member, Members
from deadpool_megatron.events import Kind

# Events that results are made of; a coordinator drops those that it has already.
_NUMBERS = (Kind.STEP, Kind.EVALUATION, Kind.STATE_HASH)


class MemberReporter:
    """Used from the agent's loop. ``send`` takes a report for the coordinator; see
    :meth:`CoordinatorLink.send`.
    """

    def __init__(self, node: int, members: Members, send: Callable[..., None]):
        self._node = node
        self._members = members
        self._send = send

    def said(self, member: Member, message: Mapping[str, Any]) -> None:
        """A member's message, with its seat; an event with its node."""
        if message.get("t") == "event":
            event = {"node": self._node, **message["event"]}
            self._send({"t": "event", "event": event}, retain=event["kind"] in _NUMBERS)
            return
        seat = {"slot": member.slot, "incarnation": member.incarnation}
        self._send({"t": "member", **seat, "m": message})

    def frozen(self, member: Member, silent_seconds: float) -> None:
        """A member shows no sign of life since then."""
        seat = {"slot": member.slot, "incarnation": member.incarnation}
        cause = f"member {self._node}.{member.slot}.{member.incarnation} is frozen"
        how = {"cause": cause, "silent_seconds": silent_seconds}
        self._send({"t": "member-suspected", **seat, **how})

    def lost(self, slot: int, incarnation: int, how: Mapping[str, Any], cause: str) -> None:
        """A member has ended, or could not be started."""
        seat = {"slot": slot, "incarnation": incarnation}
        self._send({"t": "member-lost", **seat, **how, "cause": cause})

    def repeat(self, closed: Callable[[], int], within_seconds: float) -> None:
        """Tell a new coordinator what the members have said since the epoch that is closed by then;
        all agents at once may be too many.
        """
        if within_seconds:
            moment = random.uniform(0, within_seconds)
            asyncio.get_running_loop().call_later(moment, self.repeat, closed, 0.0)
            return
        for member in self._members.by_slot.values():
            for said in member.said_since(closed()):
                self.said(member, said)
