"""A line between agents' links and coordinators, in memory and in virtual time, that can be cut.

The real :class:`CoordinatorLink`, :class:`Peers` and :class:`Orders` talk over streams that exist
in this process only. A cut happens at a chosen frame, in one of several ways. Time jumps to the
next timer whenever nothing is left to do, so that seconds cost nothing and nothing is left to luck.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.orders import Orders
from deadpool_megatron.cluster.link import agent_link, peers
from deadpool_megatron.cluster.link.agent_link import CoordinatorLink
from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.sealed_records import RecordReader
from tests.cluster.link.streams import Stream
from tests.common.virtual_time import VirtualLoop

NODE = 3
_TICK_SECONDS = 0.1
# Longer than an agent waits for an answer, shorter than the limit of its fence.
_LATE_SECONDS = 2.5


class How(StrEnum):
    """What a cut does to the connection on which the frame is."""

    RESET = "reset"  # both ends hear of it, the frame is lost
    RESET_AFTER = "reset-after"  # the same, once the frame has arrived
    SILENT = "silent"  # from this frame on nothing arrives, and nobody hears of it
    DEAF = "deaf"  # the same, in this direction only
    LATE = "late"  # it arrives late, as does all that is sent after it in this direction


@dataclass
class _Connection:
    """Both directions of one connection: each end, and the reader of the other."""

    line: Line
    readers: list[RecordReader]
    lost: set[int] = field(default_factory=set)
    late: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    over: bool = False

    def carry(self, end: int, data: bytes) -> None:
        how = self.line.cuts.pop(self.line.frames, None)
        self.line.frames += 1
        if how in (How.SILENT, How.DEAF):
            self.lost |= {end} if how is How.DEAF else {0, 1}
        if how is How.LATE and end not in self.late:
            self.late[end] = []
            asyncio.get_running_loop().call_later(_LATE_SECONDS, self._deliver, end)
        if how is not How.RESET and end not in self.lost and not self.over:
            self._pass_on(end, partial(self.readers[1 - end].feed_data, data))
        if how in (How.RESET, How.RESET_AFTER):
            self.end(ConnectionResetError("cut"))

    def end(self, error: Exception | None = None) -> None:
        if self.over:
            return
        self.over = True
        for end, reader in enumerate(self.readers):
            if 1 - end in self.lost:
                continue  # it never hears of it
            if error is None:
                self._pass_on(1 - end, reader.feed_eof)
            else:
                self._pass_on(1 - end, partial(reader.set_exception, error))

    def _pass_on(self, end: int, action: Callable[[], None]) -> None:
        if end in self.late:
            self.late[end].append(action)
        else:
            action()

    def _deliver(self, end: int) -> None:
        for action in self.late.pop(end):
            action()


class _Writer(Stream):
    """That of one end of a connection."""

    def __init__(self, connection: _Connection, end: int) -> None:
        super().__init__()
        self._connection = connection
        self._end = end
        self._lingers = True

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self._connection.carry(self._end, data)

    def is_closing(self) -> bool:
        return self.is_closed or self._connection.over

    def setsockopt(self, *option: int | bytes) -> None:
        assert option[:2] == (socket.SOL_SOCKET, socket.SO_LINGER)
        self._lingers = False

    def close(self) -> None:
        super().close()
        self._connection.end()

    def abort(self) -> None:
        super().abort()
        self._connection.end(None if self._lingers else ConnectionResetError("reset"))


class Office:
    """The coordinator of one term, as far as agents and orders go."""

    def __init__(self, settings: Settings, nodes: int, term: int) -> None:
        info = SimpleNamespace(settings=settings, nodes=nodes, spares=0)
        options: Any = SimpleNamespace(info=info, term=SimpleNamespace(number=term))
        self.peers = Peers(settings, self, term)
        self.orders = Orders(options, self.peers)
        self.reports: list[Any] = []
        self.left: set[int] = set()
        self.newer_terms: list[str] = []
        self.terms: list[int] = []
        self._state: Any = SimpleNamespace(open_epoch=0, phase=Phase.RUNNING, seats=range(nodes))

    @property
    def is_left(self) -> bool:
        """Whether a node was given away."""
        return bool(self.left)

    def agent_joined(self, peer: AgentPeer, message: Mapping[str, Any], again: bool) -> None:
        self.terms.append(int(message["term"]))
        self.orders.welcome(peer.node, None, self._state)
        del again

    def agent_reported(self, peer: AgentPeer, message: Mapping[str, Any]) -> None:
        self.reports.append(message["value"])
        del peer

    def agent_left(self, peer: AgentPeer, cause: str) -> None:
        if not peer.dropped:  # as the coordinator's service does
            self.left.add(peer.node)
        del cause

    def superseded(self, reason: str) -> None:
        self.newer_terms.append(reason)

    async def command(self, message: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def refused(self, sender: str, reason: str) -> None:
        raise AssertionError(f"{sender}: {reason}")


class Agent:
    """The link of one agent, and the orders that it received."""

    def __init__(self, line: Line, node: int) -> None:
        self.obeyed: list[dict[str, Any]] = []
        self.link = CoordinatorLink(
            lambda: ("coordinator", line.term),
            b"",
            "run",
            line.settings,
            lambda: {"t": "join", "node": node, "boot": f"agent {node}", "told": 0},
            self._take,
        )

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["t"] != "welcome":
            self.obeyed.append(dict(message))


class Line:
    """``cuts``: by the number of the frame, counted over all connections of all agents. ``link``,
    ``obeyed``: of the first agent.
    """

    def __init__(self, cuts: Mapping[int, How], nodes: Sequence[int] = (NODE,)) -> None:
        self.settings = Settings()
        self.cuts = dict(cuts)
        self.frames = 0
        self.term = 1
        self.agents = {node: Agent(self, node) for node in nodes}
        self._offices: dict[int, Office] = {}
        self.link, self.obeyed = self.agents[nodes[0]].link, self.agents[nodes[0]].obeyed
        self.office = self._open_office()
        self.numbers = itertools.count(1)
        self._serving: set[asyncio.Task[None]] = set()

    def take_over(self) -> Office:
        """Another coordinator is the newest; the old one does not know it yet."""
        self.term += 1
        self.office = self._open_office()
        return self.office

    def _open_office(self) -> Office:
        office = self._offices[self.term] = Office(self.settings, len(self.agents), self.term)
        return office

    def go_back(self) -> Office:
        """The first coordinator is named as the newest again."""
        self.term = 1
        self.office = self._offices[1]
        return self.office

    async def live(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run the links and their beats beside the scenario."""
        running = [asyncio.create_task(agent.link.run(60.0)) for agent in self.agents.values()]
        beating = asyncio.create_task(self._beat())
        try:
            await scenario()
            assert not any(task.done() for task in running), running
        finally:
            for task in (*running, beating, *self._serving):
                task.cancel()

    async def until(self, purpose: str, ready: Callable[[], Any], seconds: float = 60.0) -> None:
        """Let time pass until it is true. Fails with ``purpose`` when that takes too long."""
        limit = asyncio.get_running_loop().time() + seconds
        while not ready():
            assert asyncio.get_running_loop().time() < limit, f"stalled: {purpose}"
            await asyncio.sleep(_TICK_SECONDS)

    async def open(self, address: tuple[str, int]) -> tuple[Any, Any]:
        """Instead of a connection over a network."""
        readers = [RecordReader(), RecordReader()]
        connection = _Connection(self, readers)
        task = asyncio.create_task(
            self._serve(self._offices[address[1]], readers[1], _Writer(connection, 1))
        )
        self._serving.add(task)
        return readers[0], _Writer(connection, 0)

    async def _serve(self, office: Office, reader: Any, writer: Any) -> None:
        try:
            await office.peers.serve(reader, writer, "somebody")
        finally:
            writer.close()

    async def _beat(self) -> None:
        while True:
            for agent in self.agents.values():
                if agent.link.beat_is_due:
                    agent.link.beat()
            await asyncio.sleep(_TICK_SECONDS)


def play(
    cuts: Mapping[int, How],
    scenario: Callable[[Line], Awaitable[None]],
    nodes: Sequence[int] = (NODE,),
) -> Line:
    """Run a scenario on a line with these cuts, in virtual time."""

    async def nothing(*_: object) -> None:
        """Instead of a handshake."""

    async def run() -> Line:
        clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        patch.setattr(agent_link, "time", clock)
        patch.setattr(peers, "time", clock)
        line = Line(cuts, nodes)
        patch.setattr(agent_link, "open_stream", line.open)
        await line.live(lambda: scenario(line))
        return line

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        patch.setattr(agent_link, "connect_stream", nothing)
        return runner.run(run())
