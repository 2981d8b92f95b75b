"""Requests of users: journalled before yes is said, taken once, found by the next coordinator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deadpool_megatron.cluster.coordinator.commands import UserRequests
from deadpool_megatron.cluster.journal import user_requests
from deadpool_megatron.cluster.journal.journal import Journal, JournalError, LostRace
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.settings import Settings

DRAIN = {"node": 1}
STOP = {"dump": True, "keeps": True, "reason": "enough"}


class Coordinator:
    """One whose machine does nothing with a request but remember it."""

    def __init__(self, journal: Journal, term: int, *, restarted: bool = False) -> None:
        self.options = SimpleNamespace(
            journal=journal,
            term=SimpleNamespace(number=term),
            restarted=restarted,
            info=SimpleNamespace(settings=Settings(spare_timeout_seconds=0.2)),
        )
        self.state = SimpleNamespace(
            phase=Phase.RUNNING,
            record=object(),
            requests=(),
            fleet=SimpleNamespace(nodes={0: 0, 1: 1}),
            seats={},
            protection=SimpleNamespace(plan="buddy"),
        )
        self.fed: list[Any] = []
        self.stepped_down: list[str] = []
        self.tasks: list[asyncio.Task[object]] = []
        self.superseded, self.warn = self.stepped_down.append, lambda text: None
        self.desk = UserRequests(cast(Any, self))

    def feed(self, item: inputs.Input) -> None:
        self.fed.append(item)
        if isinstance(item, inputs.Asked):
            self.state.requests = (*self.state.requests, item.request)
        elif isinstance(item, inputs.RequestsFound):
            self.state.requests = (*item.requests, *self.state.requests)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def begun(self) -> Coordinator:
        await self.desk.begin()
        return self

    async def end(self, number: int, stage: Stage) -> None:
        """The machine says what became of a request."""
        self.state.requests = tuple(
            one.at(stage) if one.number == number else one for one in self.state.requests
        )
        self.desk.note()
        await asyncio.gather(*self.tasks)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


def known(journal: Journal) -> list[tuple[int, Verb, Stage]]:
    """What a coordinator that takes over would read."""
    return [(one.number, one.verb, one.stage) for one in user_requests.newest(journal).requests]


async def test_a_request_that_is_sent_again_is_taken_once(journal: Journal) -> None:
    one = await Coordinator(journal, 1).begun()
    both = await asyncio.gather(*(one.desk.ask(Verb.DRAIN, lambda: DRAIN, "a") for _ in range(2)))
    assert [answer["request"]["number"] for answer in both] == [1, 1]
    following = await Coordinator(journal, 2).begun()
    await following.end(1, Stage.DONE)
    again = await following.desk.ask(Verb.DRAIN, lambda: DRAIN, "a")
    assert (again["request"]["number"], again["request"]["stage"]) == (1, "done")
    other = await following.desk.ask(Verb.DRAIN, lambda: DRAIN, "b")
    assert other["request"]["number"] == 2


async def test_the_next_coordinator_finds_what_is_open(journal: Journal) -> None:
    one = await Coordinator(journal, 1).begun()
    await one.desk.ask(Verb.STOP, lambda: STOP, "a", 100.0)
    following = await Coordinator(journal, 2).begun()
    (found,) = following.fed
    (request,) = found.requests
    assert (request.verb, request.stage, found.restarted) == (Verb.STOP, Stage.ASKED, False)
    left = request.until - asyncio.get_running_loop().time()
    assert 90 < left <= 100, "what the clock that all hosts share has left of it"
    again = await Coordinator(journal, 3, restarted=True).begun()
    assert again.fed[0].restarted


async def test_one_that_does_not_know_that_it_was_superseded_says_yes_to_nobody(
    journal: Journal,
) -> None:
    one = await Coordinator(journal, 1).begun()
    await Coordinator(journal, 2).begun()
    answer = await one.desk.ask(Verb.DRAIN, lambda: DRAIN, "a")
    assert not answer["ok"]
    assert one.stepped_down == ["another coordinator takes the requests"]
    assert not one.fed
    assert known(journal) == []


async def test_the_loop_goes_on_while_protection_is_reckoned(journal: Journal) -> None:
    one = await Coordinator(journal, 1).begun()
    may_go_on = threading.Event()

    def reckon() -> dict[str, Any]:
        assert may_go_on.wait(10.0), "the loop stands still"
        return {"plan": {}, "words": "parity"}

    asking = asyncio.create_task(one.desk.ask(Verb.PROTECT, reckon, "a"))
    await asyncio.sleep(0.01)
    may_go_on.set()
    assert (await asking)["request"]["what"]["words"] == "parity"


class Broken(Journal):
    def write(self, kind: str, number: int, entry: Any) -> None:
        raise JournalError("no space left")


async def test_without_a_journal_only_a_stop_is_taken(tmp_path: Path) -> None:
    """To save the state needs none, and may be the last chance."""
    one = await Coordinator(Broken(tmp_path / "journal"), 1).begun()
    answer = await one.desk.ask(Verb.DRAIN, lambda: DRAIN, "a")
    assert "no space left: nothing was taken on (unless" in answer["error"]
    assert answer["again"]
    answer = await one.desk.ask(Verb.STOP, lambda: STOP, "b")
    assert answer["ok"]
    assert [item.request.verb for item in one.fed] == [Verb.STOP]


class Contested(Journal):
    """The coordinator before takes one more, just as this one reads."""

    contests = 1

    def write(self, kind: str, number: int, entry: Any) -> None:
        if self.contests:
            self.contests -= 1
            late = Request(1, "late", Verb.DRAIN, DRAIN)
            super().write(kind, number, user_requests.entry(1, [late]))
            raise LostRace("there is one")
        super().write(kind, number, entry)


async def test_a_request_that_came_while_another_coordinator_took_over_is_not_lost(
    tmp_path: Path,
) -> None:
    one = await Coordinator(Contested(tmp_path / "journal"), 2).begun()
    (found,) = one.fed
    assert [request.token for request in found.requests] == ["late"]


async def test_many_requests_make_no_long_entry(journal: Journal) -> None:
    one = await Coordinator(journal, 1).begun()
    for number in range(1, 41):
        await one.desk.ask(Verb.DRAIN, lambda: DRAIN, str(number))
        await one.end(number, Stage.DONE)
    assert len(known(journal)) == 16
    assert known(journal)[-1][0] == 40
