"""The sign of life goes on, whatever else is slow, and in a journal of any size."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator.reporting.event_writer import EventWriter
from deadpool_megatron.cluster.coordinator.succession.sign_of_life import SignOfLife
from deadpool_megatron.cluster.journal.entries import (
    DirectoryJournal,
    LostRace,
    write_patiently,
)
from deadpool_megatron.cluster.journal.terms import Rhythm, claim_term, sign
from deadpool_megatron.events import Event, EventLog, Kind
from tests.common.waiting import PATIENCE_SECONDS

_RHYTHM = Rhythm(beat=0.01, gap=0.02, stall=0.04, alone=0.04)


@pytest.fixture
def journal(tmp_path: Path) -> DirectoryJournal:
    made = DirectoryJournal(tmp_path / "journal")
    claim_term(made, 1, "127.0.0.1", 1, 0)
    return made


def live(
    journal: DirectoryJournal, meanwhile: Callable[[list[int]], Awaitable[None]]
) -> tuple[list[int], list[str]]:
    """The coordinator of term 1 shows its sign beside something else, which is given the newer
    terms that it finds; returns these, and its troubles.
    """
    newer, troubles = list[int](), list[str]()

    async def story() -> None:
        one = SignOfLife(
            journal,
            1,
            _RHYTHM,
            is_heard=lambda: True,
            on_gap=lambda: None,
            on_newer=newer.append,
            on_trouble=troubles.append,
        )
        living = asyncio.create_task(one.run())
        await meanwhile(newer)
        living.cancel()
        one.close()

    asyncio.run(story())
    return newer, troubles


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not what():
            await asyncio.sleep(0.005)


def moving(journal: DirectoryJournal) -> Callable[[], bool]:
    """Asks whether the sign has been seen to move ten times."""
    seen: set[str] = set()

    def has_moved() -> bool:
        seen.add(journal.last_beat())
        return len(seen) > 10

    return has_moved


@pytest.mark.parametrize("told_by", ["entry", "sign"])
def test_a_look_does_not_grow_with_the_journal(
    journal: DirectoryJournal, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    """Nothing is listed; a newer term is found all the same, even if its sign was not written, or
    if this host has noted for a while that there is no such entry.
    """

    def no_list(*_: object) -> None:
        raise LostRace("the journal was listed")

    async def meanwhile(newer: list[int]) -> None:
        await until(moving(journal))
        assert newer == []
        if told_by == "entry":
            claim_term(journal, 2, "127.0.0.1", 2, 1)
        # Written again as by who beats on: the old coordinator may be about to write its own.
        await until(lambda: newer or (told_by == "sign" and journal.beat(sign(2, 1))))

    monkeypatch.setattr(DirectoryJournal, "numbers", no_list)
    assert live(journal, meanwhile) == ([2], [])


def test_a_slow_write_elsewhere_does_not_delay_it(
    journal: DirectoryJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of events that hangs when it is opened, and records whose sync does not return."""
    events, works, syncing = tmp_path / "events.jsonl", threading.Event(), threading.Event()
    os.mkfifo(events)

    def slow_sync(_: int) -> None:
        syncing.set()
        works.wait(PATIENCE_SECONDS)

    async def meanwhile(newer: list[int]) -> None:
        writer = EventWriter(EventLog(events))
        writer.write(Event(Kind.LOG, data={"text": "x"}))
        records = [
            asyncio.create_task(write_patiently(journal, ("epoch", n), {}, 0.0, print))
            for n in range(1, 9)
        ]
        await until(syncing.is_set)
        await until(moving(journal))
        assert writer.describe()["waiting"] == 1
        assert not any(record.done() for record in records)
        assert newer == []
        works.set()
        await asyncio.gather(*records)
        with open(events, "rb"):
            assert writer.close(PATIENCE_SECONDS) == 0

    monkeypatch.setattr(os, "fsync", slow_sync)
    assert live(journal, meanwhile) == ([], [])
