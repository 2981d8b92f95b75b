"""The order to save and end: noted once, carried out by whoever coordinates, not after a start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deadpool_megatron.cluster.coordinator_options import CoordinatorOptions
from deadpool_megatron.cluster.end_order import EndOrder
from deadpool_megatron.cluster.journal import DirectoryJournal, Journal, JournalError, LostRace
from deadpool_megatron.cluster.machine_state import Phase, State


class World:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.phase = Phase.RUNNING
        self.orders: list[tuple[str, float | None]] = []

    def coordinator(self, *, restarted: bool = False) -> EndOrder:
        return EndOrder(
            cast(CoordinatorOptions, SimpleNamespace(journal=self.journal, restarted=restarted)),
            lambda: cast(State, SimpleNamespace(phase=self.phase)),
            lambda reason, seconds: self.orders.append((reason, seconds)),
        )

    def notes(self) -> int:
        return len(self.journal.entries("end"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(DirectoryJournal(tmp_path / "journal"))


def test_the_next_coordinator_carries_it_out_once_it_knows_what_goes_on(world: World) -> None:
    world.coordinator().take("enough", 100.0)
    world.orders.clear()
    world.phase = Phase.GATHERING
    following = world.coordinator()
    following.tick()
    assert not world.orders
    world.phase = Phase.RUNNING
    following.tick()
    following.tick()
    ((reason, seconds),) = world.orders
    assert reason == "enough"
    assert seconds is not None
    assert 90 < seconds <= 100


def test_without_haste_there_is_none_later(world: World) -> None:
    world.coordinator().take("enough", None)
    world.orders.clear()
    world.coordinator().tick()
    assert world.orders == [("enough", None)]


def test_orders_that_are_repeated_are_noted_once_and_earlier_ends_again(world: World) -> None:
    order = world.coordinator()
    for seconds in (100.0, 99.0, 98.0, None):
        order.take("enough", seconds)
    assert world.notes() == 1
    order.take("enough", 10.0)
    assert world.notes() == 2
    assert [seconds for _, seconds in world.orders] == [100.0, 99.0, 98.0, None, 10.0]


def test_a_run_that_is_started_again_has_nothing_to_end(world: World) -> None:
    world.coordinator().take("enough", 100.0)
    world.orders.clear()
    for restarted in (True, False):
        world.coordinator(restarted=restarted).tick()
    assert not world.orders


class Broken(DirectoryJournal):
    error: JournalError = JournalError("no space left")

    def write(self, kind: str, number: int, entry: Any) -> None:
        raise self.error


def test_a_state_is_saved_without_a_journal_too_but_not_by_who_has_lost_the_term(
    tmp_path: Path,
) -> None:
    world = World(Broken(tmp_path / "journal"))
    world.coordinator().take("enough", 100.0)
    assert world.orders == [("enough", 100.0)]
    Broken.error = LostRace("term 2 has begun")
    with pytest.raises(LostRace):
        world.coordinator().take("enough", 100.0)
    assert len(world.orders) == 1
