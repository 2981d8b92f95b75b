"""Who is let in by the coordinator, over real sockets in one event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import connect_stream
from deadpool_megatron.wire.listener import Door, Lock
from deadpool_megatron.wire.records import RecordWriter
from deadpool_megatron.wire.tls import open_stream

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

    def agent_said(self, peer: AgentPeer, message: Mapping[str, Any]) -> None:
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
        door = Door(listener, Lock(SECRET, "run", None, SECONDS), peers)
        opened = asyncio.create_task(door.run())
        try:
            await scenario(events, listener.getsockname())
        finally:
            opened.cancel()
            door.close()
        return events

    return asyncio.run(run())


def join(node: int, boot: str = "a", greeting: int = 1) -> dict[str, Any]:
    first = {"t": "join", "node": node, "boot": boot, "greeting": greeting}
    return {**first, "hostname": "h", "term": 0}


async def connect(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await open_stream(address, None)
    await connect_stream(reader, writer, SECRET, "run")
    return reader, writer


def test_command_and_unknown_first_message() -> None:
    async def scenario(events: Events, address: tuple[str, int]) -> None:
        reader, writer = await connect(address)
        writer.write(framing.encode({"t": "control", "command": "status"}))
        assert (await framing.read_frame(reader))["echo"] == "status"
        _, writer = await connect(address)
        writer.write(framing.encode({"t": "shell"}))
        await events.until(lambda: events.refusals)

    assert "unknown first message 'shell'" in serve(scenario).refusals[0]


def test_second_agent_of_a_node_is_refused_but_the_same_one_may_reconnect() -> None:
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


def test_a_greeting_that_arrives_after_a_later_one_changes_nothing() -> None:
    """Its agent has been welcomed on the later one and closes this one, which must not look like
    the end of its node."""

    async def scenario(events: Events, address: tuple[str, int]) -> None:
        late, (reader, writer) = await connect(address), await connect(address)
        writer.write(framing.encode(join(3, greeting=2)))
        assert (await framing.read_frame(reader))["t"] == "welcome"
        late[1].write(framing.encode(join(3, greeting=1)))
        late[1].close()
        assert await late[0].read() == b""
        writer.write(framing.encode({"t": "report", "n": 1, "value": "still here"}))
        await events.until(lambda: events.said)
        assert events.joined == [(3, False)]
        assert events.left == events.refusals == []

    serve(scenario)


def test_an_agent_that_greets_again_before_its_welcome_has_one_answer() -> None:
    async def scenario(events: Events, address: tuple[str, int]) -> None:
        events.is_slow = True
        agents = [await connect(address), await connect(address)]
        for number, (_, writer) in enumerate(agents, 1):
            writer.write(framing.encode(join(3, greeting=number)))
            await events.until(lambda number=number: len(events.joined) == number)
        assert events.peers is not None
        assert not events.peers.agents[3].welcomed
        events.welcome(events.peers.agents[3])
        assert await agents[0][0].read() == b""
        assert (await framing.read_frame(agents[1][0]))["t"] == "welcome"
        assert events.left == []

    serve(scenario)


def test_agent_that_goes_over_to_a_newer_term_says_so_before_it_leaves() -> None:
    async def scenario(events: Events, address: tuple[str, int]) -> None:
        _, writer = await connect(address)
        writer.write(framing.encode(join(3)))
        await events.until(lambda: events.joined)
        writer.write(framing.encode({"t": "superseded", "why": "went over to term 2"}))
        writer.close()
        await events.until(lambda: events.left)
        assert events.farewells == ["node 3: went over to term 2"]

    serve(scenario)


def test_coordinator_hears_most_agents_its_own_one_not_counted() -> None:
    async def scenario(events: Events, address: tuple[str, int]) -> None:
        agents = [await connect(address) for _ in range(4)]  # kept: what is dropped is closed
        for node, (_, writer) in enumerate(agents):
            writer.write(framing.encode(join(node)))
        await events.until(lambda: len(events.joined) == 4)
        peers = events.peers
        assert peers is not None
        now = max(peer.heard_at for peer in peers.agents.values())
        for node in (0, 1):
            peers.agents[node].heard_at = now - 3.0
        assert peers.hears_most(2.0, now, own_node=None)
        assert peers.hears_most(4.0, now, own_node=3)
        assert not peers.hears_most(2.0, now, own_node=3)
        assert peers.hears_most(2.0, now, own_node=0)

    serve(scenario)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ConnectionResetError("of another connection"),
        KeyError("epoch"),
        AssertionError("a mistake of ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_our_own_code_raises_at_a_report_is_no_cut_connection(error: Exception) -> None:
    """Refused, counted, shown and acknowledged: neither the agent nor this process ends by it."""

    async def scenario(events: Events, address: tuple[str, int]) -> None:
        events.fails_at = {"poison": error}
        reader, writer = await connect(address)
        writer.write(framing.encode(join(3)))
        assert (await framing.read_frame(reader))["t"] == "welcome"
        for number, value in ((1, "before"), (2, "poison"), (3, "after")):
            writer.write(framing.encode({"t": "report", "n": number, "value": value}))
        writer.write(framing.encode({"t": "beat", "members": {}, "vault": {}, "b": 1.0, "o": 0}))
        assert (await framing.read_frame(reader))["n"] == 3
        assert events.peers is not None
        assert events.peers.refusals == 1
        assert list(events.peers.agents) == [3]
        assert events.left == []

    events = serve(scenario)
    assert events.said == ["before", "after"]
    assert len(events.refusals) == 1
    assert type(error).__name__ in events.refusals[0]


@pytest.mark.parametrize(
    "message",
    [
        {"t": "report", "value": "without a number"},
        {"t": "beat", "members": {"x": {}}, "vault": {}, "b": 1.0, "o": 0},
        {"t": "superseded", "term": "soon"},
        {"t": []},
    ],
    ids=str,
)
def test_message_without_sense_is_refused_and_its_agent_stays(message: dict[str, Any]) -> None:
    async def scenario(events: Events, address: tuple[str, int]) -> None:
        reader, writer = await connect(address)
        writer.write(framing.encode(join(3)) + framing.encode(message))
        writer.write(framing.encode({"t": "report", "n": 1, "value": "after"}))
        await events.until(lambda: events.said)
        assert (await framing.read_frame(reader))["t"] == "welcome"

    events = serve(scenario)
    assert len(events.refusals) == 1
    assert events.farewells == []


def test_agent_whose_first_message_cannot_be_used_is_told_so() -> None:
    async def scenario(events: Events, address: tuple[str, int]) -> None:
        events.fails_at = {"node-joined": AssertionError("a mistake of ours")}
        reader, writer = await connect(address)
        writer.write(framing.encode(join(3)))
        assert (await framing.read_frame(reader))["t"] == "refused"
        await events.until(lambda: events.left)

    assert len(serve(scenario).refusals) == 1


def test_what_is_cut_in_the_middle_is_an_end_like_any_other() -> None:
    """A host that is gone while its agent speaks has sent no garbage."""

    async def scenario(events: Events, address: tuple[str, int]) -> None:
        reader, writer = await connect(address)
        report = framing.encode({"t": "report", "n": 1, "value": "x" * 1000})
        # At once: what comes behind the first message is not lost either.
        writer.write(framing.encode(join(3)) + framing.encode({"t": "report", "n": 1, "value": 1}))
        assert (await framing.read_frame(reader))["t"] == "welcome"
        await events.until(lambda: events.said)
        assert isinstance(writer, RecordWriter)
        assert writer._sending is not None
        asyncio.StreamWriter.write(writer, writer._sending.seal(report)[:500])
        writer.close()
        await events.until(lambda: events.left)

    events = serve(scenario)
    assert (events.said, events.left, events.refusals) == ([1], [3], [])
