"""Who is let in by the coordinator, over real sockets in one event loop."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import connect_stream
from deadpool_megatron.wire.listener import Listener
from deadpool_megatron.wire.sealed_records import open_stream

SECRET = b"secret"
SECONDS = 20.0


class Events:
    """Records what the coordinator would be told; welcomes everybody."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.refusals: list[str] = []
        self.joined: list[tuple[int, bool]] = []
        self.left: list[int] = []
        self.farewells: list[str] = []
        self.changed = asyncio.Event()
        self.peers: Peers | None = None
        self.is_slow = False  # somebody else welcomes
        self.fails_at: dict[object, Exception] = {}  # values of reports

    def agent_joined(self, peer: AgentPeer, message: Mapping[str, Any], again: bool) -> None:
        assert self.peers is not None
        if "node-joined" in self.fails_at:
            raise self.fails_at["node-joined"]
        self.joined.append((peer.node, again))
        if not self.is_slow:
            self.welcome(peer)
        self.changed.set()
        del message

    def welcome(self, peer: AgentPeer) -> None:
        assert self.peers is not None
        self.peers.welcome(
            peer, {"t": "welcome", "term": 1, "seen": self.peers.taken(peer), "record": None}
        )

    def agent_reported(self, peer: AgentPeer, message: Mapping[str, Any]) -> None:
        del peer
        if (error := self.fails_at.get(message.get("value"))) is not None:
            raise error
        self.said.append(message.get("value"))
        self.changed.set()

    def agent_left(self, peer: AgentPeer, cause: str) -> None:
        del cause
        self.left.append(peer.node)
        self.changed.set()

    def superseded(self, why: str) -> None:
        self.farewells.append(why)
        self.changed.set()

    async def command(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"ok": True, "echo": message["command"]}

    def refused(self, who: str, why: str) -> None:
        del who
        self.refusals.append(why)
        self.changed.set()

    async def until(self, ready: Callable[[], Any]) -> None:
        async with asyncio.timeout(SECONDS):
            while not ready():
                self.changed.clear()
                await self.changed.wait()


Scenario = Callable[[Events, tuple[str, int]], Awaitable[None]]


def serve(scenario: Scenario) -> Events:
    """Run a scenario against a listening :class:`Peers`."""

    async def run() -> Events:
        events = Events()
        peers = Peers(Settings(connect_seconds=SECONDS), events, term=1)
        events.peers = peers
        listener = socket.create_server(("127.0.0.1", 0))
        door = Listener(listener, SECRET, "run", SECONDS, peers)
        opened = asyncio.create_task(door.run())
        try:
            await scenario(events, listener.getsockname())
        finally:
            opened.cancel()
            door.close()
        return events

    return asyncio.run(run())


def join(node: int, boot: str = "a", greeting: int = 1) -> dict[str, Any]:
    return {"t": "join", "node": node, "boot": boot, "greeting": greeting, "term": 0}


async def connect(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await open_stream(address)
    await connect_stream(reader, writer, SECRET, "run")
    return reader, writer


def test_command_and_unknown_first_message():
    async def scenario(events: Events, address: tuple[str, int]) -> None:
        reader, writer = await connect(address)
        writer.write(framing.encode({"t": "control", "command": "status"}))
        assert (await framing.read_frame(reader))["echo"] == "status"
        _, writer = await connect(address)
        writer.write(framing.encode({"t": "shell"}))
        await events.until(lambda: events.refusals)

    assert "unknown first message 'shell'" in serve(scenario).refusals[0]


def test_second_agent_of_a_node_is_refused_but_the_same_one_may_reconnect():
    async def scenario(events: Events, address: tuple[str, int]) -> None:
        _, first = await connect(address)
        first.write(framing.encode(join(3, boot="a")))
        await events.until(lambda: events.joined)
        reader, writer = await connect(address)
        writer.write(framing.encode(join(3, boot="b")))
        assert (await framing.read_frame(reader))["t"] == "refused"
        _, again = await connect(address)
        again.write(framing.encode(join(3, boot="a")))
        await events.until(lambda: len(events.joined) == 2)
        again.close()
        await events.until(lambda: events.left)

    events = serve(scenario)
    assert events.joined == [(3, False), (3, True)]
    assert events.left == [3]
