"""Connections of an agent: their rhythm, late answers, ends with messages on their way."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, cast

import pytest

from deadpool_megatron.cluster.link import agent_link
from deadpool_megatron.cluster.link.agent_link import Contact, CoordinatorLink, CoordinatorLost
from deadpool_megatron.cluster.link.message_limits import answer_seconds
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import NAT_VARIABLE
from deadpool_megatron.wire.framing import reset
from deadpool_megatron.wire.listener import Listener
from tests.cluster.link.line import Agent, How, Line, Office, play
from tests.cluster.link.streams import Stream
from tests.cluster.link.test_orders_once import beginning
from tests.common.wait import until

NEVER_SECONDS = 1e6
SECRET = b"secret"
SECONDS = 20.0


def serve(scenario: Callable[[Office, tuple[str, int]], Awaitable[None]]) -> Office:
    """Run a scenario with a coordinator that listens on a real socket."""

    async def run() -> Office:
        office = Office(Settings(connect_seconds=SECONDS), nodes=1, term=1)
        listener = socket.create_server(("127.0.0.1", 0))
        door = Listener(listener, SECRET, "run", SECONDS, office.peers)
        serving = asyncio.create_task(door.run())
        try:
            await scenario(office, listener.getsockname())
        finally:
            serving.cancel()
            door.close()
        return office

    return asyncio.run(run())


def join(greeting: int = 1) -> dict[str, Any]:
    return {"t": "join", "node": 0, "boot": "a", "greeting": greeting, "term": 0}


def made(
    address: Callable[[], tuple[str, int]], obeyed: list[Mapping[str, Any]]
) -> CoordinatorLink:
    first = iter(range(1, 100))
    return CoordinatorLink(
        address, SECRET, "run", Settings(), lambda: join(next(first)), obeyed.append
    )


def session(term: int) -> Contact:
    welcome = {"t": "welcome", "term": term, "boot": f"coordinator {term}", "seen": 0}
    writer = cast(asyncio.StreamWriter, Stream())
    return Contact(asyncio.StreamReader(), writer, ("h", 1), 0.0, welcome)


def begin(link: CoordinatorLink, contact: Contact) -> asyncio.Task[None]:
    """A connection is made; returns what reads it."""
    link._begin(contact)
    assert link._read_task is not None
    return link._read_task


@pytest.mark.parametrize("turns", range(8))
async def test_replaced_connection_is_no_longer_obeyed(turns):
    """Its last bytes may come late: their orders would be taken for those of its successor."""
    obeyed: list[Mapping[str, Any]] = []
    link = made(lambda: ("h", 1), obeyed)
    first, second = session(1), session(2)
    begin(link, first)
    await asyncio.sleep(0.01)
    for number in (50, 51):
        first.reader.feed_data(framing.encode({"t": "close", "of": 1, "o": number}))
    for _ in range(turns):
        await asyncio.sleep(0)
    reading = begin(link, second)
    second.reader.feed_data(framing.encode({"t": "start", "of": 2, "o": 1}))
    await asyncio.sleep(0.05)
    reading.cancel()
    replaced = next(n for n, each in enumerate(obeyed) if each.get("term") == 2)
    assert [each["of"] for each in obeyed[replaced + 1 :]] == [2]


@pytest.mark.parametrize("terms", [(1, 1), (2, 1)])
def test_late_greeting_repeats_no_order_and_no_old_term(terms):
    """It was made before the order came on the connection that it replaces."""
    obeyed: list[Mapping[str, Any]] = []

    async def run() -> CoordinatorLink:
        link = made(lambda: ("h", 1), obeyed)
        for each in [session(term) for term in terms]:
            reading = begin(link, each)
            each.reader.feed_data(framing.encode({"t": "close", "o": 1}))
            await asyncio.sleep(0.05)
        reading.cancel()
        return link

    link = asyncio.run(run())
    assert link._first_message()["term"] == max(terms)
    orders = sum(each["t"] == "close" for each in obeyed)
    assert orders == len(set(terms)), "each coordinator's own"


class Proxy:
    """Between an agent and the coordinator. Of a direction that is in ``spoiled`` it alters the
    next byte, and tells either side how the other has ended.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.spoiled: set[str] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(*self._address)
        await asyncio.gather(
            self._pump("up", reader, other_writer), self._pump("down", other_reader, writer)
        )

    async def _pump(
        self, direction: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        try:
            while data := await source.read(1000):
                if direction in self.spoiled:
                    self.spoiled.remove(direction)
                    data = data[:-1] + bytes([data[-1] ^ 1])
                sink.write(data)
        except OSError:
            reset(sink)
        else:
            sink.close()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["up", "down"])
def test_altered_record_costs_a_connection_and_no_node(monkeypatch, direction):
    monkeypatch.setenv(NAT_VARIABLE, "1")

    async def scenario(office: Office, address: tuple[str, int]) -> None:
        proxy = Proxy(address)
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        link = made(lambda: server.sockets[0].getsockname(), [])
        running = asyncio.ensure_future(link.run(SECONDS))
        await until(lambda: link.connected)
        proxy.spoiled.add(direction)
        link.send({"t": "report", "value": "while it happens"})
        # Half a second is what a lost connection has to come back: nothing follows from it later.
        end = asyncio.get_running_loop().time() + 1.5
        while asyncio.get_running_loop().time() < end or not office.reports:
            link.beat()
            await asyncio.sleep(0.05)
        assert not office.is_left
        running.cancel()
        server.close()

    office = serve(scenario)
    assert len(office.terms) == 2
    assert office.reports == ["while it happens"]


def test_abandoned_greeting_sends_nothing():
    """Whatever it waits for then: the coordinator would take it for the agent's newest."""
    sent: list[None] = []

    def first() -> Mapping[str, Any]:
        sent.append(None)
        return join()

    async def scenario(_: Office, address: tuple[str, int]) -> None:
        for turns in range(60):
            greetings = agent_link.Greetings(SECRET, "run", Settings(), first)
            greetings.begin(address, SECONDS)
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks, before = greetings.tasks, len(sent)
            greetings.close()
            await asyncio.wait(tasks, timeout=SECONDS)
            assert len(sent) == before, f"left after {turns} turns"

    serve(scenario)


class Doors:
    """``seconds``: how long each further connection to the coordinator of a term waits for its
    handshake; ``refusing``: a term whose coordinator has ended; ``opened``: the agent's ends of
    these, and when they were opened.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self.seconds: dict[int, Iterator[float]] = {}
        self.refusing = 0
        self.opened: list[tuple[float, Any]] = []
        self.max_waiting = 0

    def are_slow(self, term: int, seconds: Iterable[float]) -> None:
        self.seconds[term] = iter(seconds)

    async def open(self, address: tuple[str, int]) -> tuple[Any, Any]:
        if address[1] == self.refusing:
            raise ConnectionRefusedError
        reader, writer = await self._line.open(address)
        if address[1] in self.seconds:
            self.opened.append((asyncio.get_running_loop().time(), writer))
            writer.waits_seconds = next(self.seconds[address[1]])
        return reader, writer

    async def connect(self, _reader: object, writer: Any, *_: object) -> None:
        waiting = sum(not each.is_closing() for _, each in self.opened)
        self.max_waiting = max(self.max_waiting, waiting)
        await asyncio.sleep(getattr(writer, "waits_seconds", 0.0))


def before_doors(scenario: Callable[[Line, Doors], Awaitable[None]]) -> None:
    async def run(line: Line) -> None:
        doors = Doors(line)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agent_link, "open_stream", doors.open)
            patch.setattr(agent_link, "connect_stream", doors.connect)
            await scenario(line, doors)

    play({}, run)


@pytest.mark.parametrize("has_session", [True, False])
def test_agent_keeps_its_place_in_a_queue(has_session):
    """Whoever comes again goes to its end, and would never get in where it is long."""

    async def scenario(line: Line, doors: Doors) -> None:
        await beginning(line)
        doors.are_slow(2, repeat(5.0))
        if not has_session:
            line.cuts = {line.frames: How.RESET}
        new = line.take_over()
        await line.until("a welcome", new.peers.active)
        # The others that were sent beside it had nothing to say any more.
        await asyncio.sleep(10.0)
        assert new.terms == [1]
        assert doors.max_waiting == 2

    before_doors(scenario)


def test_successor_is_not_kept_waiting():
    """The pauses between attempts grow while nobody has taken over."""

    async def scenario(line: Line, doors: Doors) -> None:
        await beginning(line)
        doors.refusing, line.cuts = 1, {line.frames: How.RESET}
        await asyncio.sleep(2.0)
        await line.until("a welcome", line.take_over().peers.active, 0.1)

    before_doors(scenario)


def test_cut_greeting_delays_no_other():
    async def scenario(line: Line, doors: Doors) -> None:
        await beginning(line)
        doors.are_slow(1, chain([NEVER_SECONDS], repeat(0.0)))
        line.cuts = {line.frames: How.RESET}
        limit_seconds = answer_seconds(line.settings) + line.settings.fence_seconds / 6
        await line.until("a greeting", lambda: doors.opened)
        await line.until("another", lambda: len(line.office.terms) == 2, limit_seconds)

    before_doors(scenario)


def test_silent_coordinator_is_given_up():
    async def scenario(line: Line, doors: Doors) -> None:
        await beginning(line)
        doors.are_slow(1, repeat(NEVER_SECONDS))
        link = Agent(line, 9).link
        link._boot = "an earlier boot"
        with pytest.raises(CoordinatorLost, match="no coordinator for 30 s"):
            await link.run(30.0)
        assert doors.max_waiting == 2

    before_doors(scenario)
