"""Members that do not move are asked where they stand before they are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from deadpool_megatron.cluster.agent.members.members import Member
from deadpool_megatron.cluster.process.stacks import Stacks, ask
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import EpochRecord, Seat

_ANSWER_SECONDS = 0.5


class LastStacks:
    """Used from the agent's loop. ``record()`` is the newest record, ``report`` takes a message for
    the coordinator.
    """

    def __init__(
        self,
        node: int,
        record: Callable[[], EpochRecord | None],
        report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._node = node
        self._record = record
        self._report = report
        self._asked: dict[Member, asyncio.Task[None]] = {}

    def kill(self, member: Member, cause: str) -> None:
        """Ask, report the answer, and kill the member, at the latest half a second from now."""
        if member not in self._asked and not member.ended.is_set():
            self._asked[member] = asyncio.create_task(self._take(member, cause))

    def kill_by_order(self, message: Mapping[str, Any], members: Mapping[int, Member]) -> None:
        """Carry out the order of the coordinator; ``members``: by slot."""
        member = members.get(int(message["slot"]))
        if member is None or member.incarnation != int(message["incarnation"]):
            return
        cause = str(message.get("cause", "killed by order of the coordinator"))
        if message.get("hung"):
            self.kill(member, cause)
        elif member not in self._asked:
            member.kill(cause)

    async def _take(self, member: Member, cause: str) -> None:
        try:
            self._tell(member, await ask(member.pid, member.log, _ANSWER_SECONDS))
        finally:
            member.kill(cause)
            del self._asked[member]

    def _tell(self, member: Member, stacks: Stacks) -> None:
        record, role = self._record(), None
        if record is not None:
            seat = Seat(self._node, member.slot, member.incarnation)
            role = next((r for r, taken in record.seats.items() if taken == seat), None)
        epoch = 0 if record is None else record.epoch
        data = {
            "slot": member.slot,
            "incarnation": member.incarnation,
            "frames": list(stacks.frames),
            "threads": stacks.threads,
            "missing": stacks.missing,
            "log": member.log.name,
        }
        event = Event(Kind.STACK, epoch, self._node, role, data=data)
        self._report({"t": "event", "event": event.to_dict()})
