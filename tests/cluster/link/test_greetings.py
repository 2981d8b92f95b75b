"""An agent before the door of a coordinator that answers late, or not at all; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from deadpool_megatron.cluster.link import greetings
from deadpool_megatron.cluster.link.agent_link import CoordinatorLost
from deadpool_megatron.cluster.link.pacing import answer_seconds
from tests.cluster.link.line import Agent, How, Line, play
from tests.cluster.link.test_orders_once import beginning

NEVER_SECONDS = 1e6


class Doors:
    """``seconds``: how long each further connection to the coordinator of a term waits for its
    handshake; ``opened``: the agent's ends of these, and when they were opened.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self.seconds: dict[int, Iterator[float]] = {}
        self.opened: list[tuple[float, Any]] = []
        self.most_waiting = 0

    def are_slow(self, term: int, seconds: Iterable[float]) -> None:
        self.seconds[term] = iter(seconds)

    async def open(self, address: tuple[str, int], tls: object) -> tuple[Any, Any]:
        reader, writer = await self._line.open(address, tls)
        if address[1] in self.seconds:
            self.opened.append((asyncio.get_running_loop().time(), writer))
            writer.waits_seconds = next(self.seconds[address[1]])
        return reader, writer

    async def connect(self, _reader: object, writer: Any, *_: object) -> None:
        waiting = sum(not one.is_closing() for _, one in self.opened)
        self.most_waiting = max(self.most_waiting, waiting)
        await asyncio.sleep(getattr(writer, "waits_seconds", 0.0))


def before_doors(scenario: Callable[[Line, Doors], Awaitable[None]]) -> None:
    async def run(line: Line) -> None:
        doors = Doors(line)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(greetings, "open_stream", doors.open)
            patch.setattr(greetings, "connect_stream", doors.connect)
            await scenario(line, doors)

    play({}, run)


@pytest.mark.parametrize("has_session", [True, False])
def test_an_agent_keeps_its_place_in_a_queue(has_session: bool) -> None:
    """Whoever comes again goes to its end, and would never get in where it is long."""

    async def scenario(line: Line, doors: Doors) -> None:
        await beginning(line)
        doors.are_slow(2, repeat(5.0))
        if not has_session:
            line.cuts = {line.frames: How.RESET}
        new = line.take_over()
        await line.until("a welcome", new.peers.listening)
        # The others that were sent beside it had nothing to say any more.
        await asyncio.sleep(10.0)
        assert new.terms == [1]
        assert doors.most_waiting == 2

    before_doors(scenario)


def test_an_agent_in_a_queue_goes_to_the_successor_that_is_elsewhere() -> None:
    """A coordinator that was stopped has a kernel that still takes connections."""

    async def scenario(line: Line, doors: Doors) -> None:
        await beginning(line)
        doors.are_slow(1, repeat(NEVER_SECONDS))
        line.cuts = {line.frames: How.RESET}
        await line.until("a connection to the stopped one", lambda: doors.opened)
        new = line.take_over()
        await line.until("a welcome", new.peers.listening, line.settings.fence_seconds / 6)

    before_doors(scenario)


def test_a_greeting_whose_network_was_cut_holds_up_no_other() -> None:
    async def scenario(line: Line, doors: Doors) -> None:
        await beginning(line)
        doors.are_slow(1, chain([NEVER_SECONDS], repeat(0.0)))
        line.cuts = {line.frames: How.RESET}
        limit_seconds = answer_seconds(line.settings) + line.settings.fence_seconds / 6
        await line.until("a greeting", lambda: doors.opened)
        await line.until("another", lambda: len(line.office.terms) == 2, limit_seconds)

    before_doors(scenario)


def test_a_coordinator_that_never_answers_is_given_up() -> None:
    async def scenario(line: Line, doors: Doors) -> None:
        await beginning(line)
        doors.are_slow(1, repeat(NEVER_SECONDS))
        link = Agent(line, 9).link
        link._boot = "the one before"
        with pytest.raises(CoordinatorLost, match="no coordinator for 30 s"):
            await link.run(30.0)
        assert doors.most_waiting == 2

    before_doors(scenario)
