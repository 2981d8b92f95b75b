"""A coordinator that takes requests, with a machine that only keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deadpool_megatron.cluster.coordinator.commands import Commands
from deadpool_megatron.cluster.journal import user_requests
from deadpool_megatron.cluster.journal.journal import Journal, JournalError, LostRace
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.settings import Settings


class Coordinator:
    """Of three nodes, two with a role. ``fed``: inputs of the machine; ``output``: warnings, orders
    and the reason for stepping down."""

    def __init__(self, journal: Journal, term: int = 1, *, restarted: bool = False) -> None:
        self.options: Any = SimpleNamespace(
            journal=journal,
            term=SimpleNamespace(number=term, to_dict=lambda: {"host": "c"}),
            restarted=restarted,
            run=SimpleNamespace(exports=Path("/exports")),
            info=SimpleNamespace(
                nodes=2,
                spares=1,
                settings=Settings(spare_timeout_seconds=0.2),
                to_dict=lambda: {"run_id": "r"},
            ),
        )
        self.state: Any = SimpleNamespace(
            phase=Phase.RUNNING,
            record=object(),
            requests=(),
            fleet=SimpleNamespace(nodes=dict.fromkeys(range(3)), removed={5: "was lost"}),
            seats={0: Seat(1, 0, 0), 1: Seat(0, 3, 7)},
        )
        self.fed: list[Any] = []
        self.output: list[Any] = []
        self.tasks: list[asyncio.Task[object]] = []
        self.superseded = self.warn = self.output.append
        self.peers: Any = SimpleNamespace(order=lambda *order: self.output.append(order))
        given: Any = self
        self.commands = Commands(given, self.describe)
        self.desk = self.commands.requests

    def describe(self) -> dict[str, Any]:
        return {"fed": len(self.fed)}

    def feed(self, item: inputs.Input) -> None:
        self.fed.append(item)
        if isinstance(item, inputs.RequestMade):
            self.state.requests = (*self.state.requests, item.request)
        elif isinstance(item, inputs.RequestsFound):
            self.state.requests = (*item.requests, *self.state.requests)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def begun(self) -> Coordinator:
        await self.desk.begin()
        return self

    async def end(self, number: int, stage: Stage) -> None:
        """Let the machine end a request."""
        self.state.requests = tuple(
            request.at(stage) if request.number == number else request
            for request in self.state.requests
        )
        self.desk.note()
        await asyncio.gather(*self.tasks)


def deliver(peers: Peers, peer: AgentPeer, message: Mapping[str, Any]) -> None:
    """Let a message of an agent arrive."""
    peers._hand_over(peer, message, peers._take)


class Broken(Journal):
    def write(self, kind: str, number: int, entry: Any) -> None:
        raise JournalError("no space left")


class Contested(Journal):
    """Of two coordinators: the predecessor takes a request while its successor reads."""

    contests = 1

    def write(self, kind: str, number: int, entry: Any) -> None:
        if self.contests:
            self.contests -= 1
            late = Request(1, "late", Verb.DRAIN, {"node": 1})
            super().write(kind, number, user_requests.entry(1, [late]))
            raise LostRace("there is one")
        super().write(kind, number, entry)
