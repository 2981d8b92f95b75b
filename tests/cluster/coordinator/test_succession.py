"""A standby next to its coordinator: looks at the journal, and reads before a claim."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from deadpool_megatron.cluster.coordinator import succession
from deadpool_megatron.cluster.coordinator.succession import RecoveredState
from deadpool_megatron.cluster.journal.journal import Journal, LostRace
from deadpool_megatron.cluster.journal.terms import HeartbeatTiming, SignOfLife, claim_term, sign
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.file_systems import TimedRead
from deadpool_megatron.layout.records import Generation, Restore
from tests.common.wait import MAX_WAIT_SECONDS

_RHYTHM = HeartbeatTiming(beat=0.01, gap=0.02, stall=0.04, alone=0.04)


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "journal")
    claim_term(made, 1, "127.0.0.1", 1, 0)
    return made


def live(
    journal: Journal, meanwhile: Callable[[list[str]], Awaitable[None]]
) -> tuple[list[str], list[str]]:
    """Run the sign of life of term 1 during ``meanwhile(newer)``, which gets the newer terms that
    are found; return these, and the troubles.
    """
    newer, troubles = list[str](), list[str]()

    async def story() -> None:
        sign_of_life = SignOfLife(
            journal,
            1,
            _RHYTHM,
            is_reachable=lambda: True,
            on_gap=lambda now: None,
            on_newer=newer.append,
            on_trouble=troubles.append,
        )
        living = asyncio.create_task(sign_of_life.run())
        await meanwhile(newer)
        living.cancel()
        sign_of_life.close()

    asyncio.run(story())
    return newer, troubles


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not ready():
            await asyncio.sleep(0.005)


def moving(journal: Journal) -> Callable[[], bool]:
    """Return a check whether the sign has changed ten times."""
    seen: set[str] = set()

    def has_moved() -> bool:
        seen.add(journal.last_beat())
        return len(seen) > 10

    return has_moved


@pytest.mark.parametrize("shown_by", ["entry", "sign"])
def test_look_lists_no_entries_of_the_journal(journal, monkeypatch, shown_by):
    """Nothing is listed; a newer term is found all the same, even if its sign was not written, or
    if this host has noted for a while that there is no such entry.
    """

    def no_list(*_: object) -> None:
        raise LostRace("the journal was listed")

    async def meanwhile(newer: list[str]) -> None:
        await until(moving(journal))
        assert newer == []
        if shown_by == "entry":
            claim_term(journal, 2, "127.0.0.1", 2, 1)
        # Written again, as the old coordinator may be about to write its own.
        await until(lambda: newer or (shown_by == "sign" and journal.beat(sign(2, 1))))

    monkeypatch.setattr(Journal, "numbers", no_list)
    assert live(journal, meanwhile) == (["term 2 has begun"], [])


@pytest.mark.usefixtures("pipes_hang")
def test_takeover_does_not_wait_for_a_hanging_run_directory(tmp_path):
    run, journal = RunDirectory(tmp_path), Journal(tmp_path / "journal")
    os.mkfifo(run.latest)
    durable = TimedRead(partial(succession.valid_checkpoints, run))
    began = time.monotonic()
    assert succession.look_up(journal, durable) == RecoveredState(is_durable_read=False)
    assert time.monotonic() - began < 5.0
    saved = Restore("durable", Generation(1, 4), "save", str(tmp_path))
    run.latest.write_text(json.dumps(saved.to_dict()))
    assert durable.look(20.0) == (saved,)
