"""The order to save and end: noted once, carried out by whoever coordinates, not after a start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deadpool_megatron.cluster.coordinator.end_order import EndOrder
from deadpool_megatron.cluster.coordinator.options import CoordinatorOptions
from deadpool_megatron.cluster.journal.entries import (
    DirectoryJournal,
    Journal,
    JournalError,
    LostRace,
)
from deadpool_megatron.cluster.machine.state import Phase, State
from deadpool_megatron.settings import Settings


class World:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.phase = Phase.RUNNING
        self.record: object = "the newest one"
        self.orders: list[tuple[str, float | None]] = []

    def coordinator(self, *, restarted: bool = False) -> EndOrder:
        info = SimpleNamespace(settings=Settings())
        options = SimpleNamespace(journal=self.journal, restarted=restarted, info=info)
        return EndOrder(
            cast(CoordinatorOptions, options),
            lambda: cast(State, SimpleNamespace(phase=self.phase, record=self.record)),
            lambda reason, seconds: self.orders.append((reason, seconds)),
        )

    def seconds(self) -> list[float | None]:
        """Of all orders so far, in whole ones."""
        return [None if seconds is None else round(seconds) for _, seconds in self.orders]


def take(order: EndOrder, *seconds: float | None) -> None:
    async def take_all() -> None:
        for each in seconds:
            await order.take("enough", each)

    asyncio.run(take_all())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(DirectoryJournal(tmp_path / "journal"))


def test_the_next_coordinator_carries_it_out_once(world: World) -> None:
    take(world.coordinator(), 100.0)
    world.orders.clear()
    following = world.coordinator()
    assert not world.orders, "before it is known what goes on"
    following.carry_out()
    following.carry_out()
    assert world.orders[0][0] == "enough"
    assert world.seconds() == [100]


def test_an_order_that_comes_while_agents_come_back_waits_for_them(world: World) -> None:
    """At once the epoch would be closed without the pause, and without the last export."""
    take(world.coordinator(), 100.0)
    world.orders.clear()
    world.phase = Phase.GATHERING
    following = world.coordinator()
    take(following, 95.0, 20.0, 90.0)
    assert not world.orders
    following.carry_out()
    assert world.seconds() == [20], "the earliest end"


def test_who_does_not_want_to_wait_is_heard_beside_a_time_limit(world: World) -> None:
    order = world.coordinator()
    take(order, 100.0, None)
    assert world.seconds() == [100, None]
    world.orders.clear()
    world.coordinator().carry_out()
    assert world.seconds() == [100, None], "in this order: the dump comes next, and has a limit"


def test_a_later_end_than_the_one_that_was_found_changes_nothing(world: World) -> None:
    take(world.coordinator(), 20.0)
    take(world.coordinator(), 3600.0)
    assert len(world.journal.entries("end")) == 1
    world.orders.clear()
    world.coordinator().carry_out()
    assert world.seconds() == [20]


def test_an_order_to_who_had_been_superseded_without_knowing_it(world: World) -> None:
    """Its successor had looked into the journal by then, and looks again."""

    async def story() -> None:
        world.phase = Phase.GATHERING
        following = world.coordinator()
        earlier = world.coordinator()
        await earlier.take("enough", 100.0)
        world.phase = Phase.RUNNING
        following.carry_out()
        async with asyncio.timeout(10):
            while not world.orders:
                await asyncio.sleep(0.01)
        await following.take("enough", 10.0)

    asyncio.run(story())
    assert world.seconds() == [100, 10]
    assert len(world.journal.entries("end")) == 2


def test_nothing_was_begun_yet(world: World) -> None:
    world.phase, world.record = Phase.GATHERING, None
    take(world.coordinator(), 100.0)
    assert world.seconds() == [100]


def test_without_haste_there_is_none_later(world: World) -> None:
    take(world.coordinator(), None)
    world.orders.clear()
    world.coordinator().carry_out()
    assert world.orders == [("enough", None)]


def test_orders_that_are_repeated_are_noted_once_and_earlier_ends_again(world: World) -> None:
    order = world.coordinator()
    take(order, 100.0, 99.0, 98.0)
    assert len(world.journal.entries("end")) == 1
    take(order, 10.0)
    assert len(world.journal.entries("end")) == 2
    assert world.seconds() == [100, 99, 98, 10]


def test_a_run_that_is_started_again_has_nothing_to_end(world: World) -> None:
    take(world.coordinator(), 100.0)
    world.orders.clear()
    for restarted in (True, False):
        world.coordinator(restarted=restarted).carry_out()
    assert not world.orders


class Broken(DirectoryJournal):
    error: JournalError

    def write(self, kind: str, number: int, entry: Any) -> None:
        raise self.error


@pytest.mark.parametrize("error", [JournalError("no space left"), LostRace("there is one")])
def test_a_state_is_saved_without_a_journal_too(tmp_path: Path, error: JournalError) -> None:
    journal = Broken(tmp_path / "journal")
    journal.error = error
    world = World(journal)
    take(world.coordinator(), 100.0)
    assert len(world.orders) == 1, "a second later at most"
