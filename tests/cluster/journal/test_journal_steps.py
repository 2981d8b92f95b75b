"""Decisions at their smallest steps: death between any two lines, two writers in every order."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.journal.journal import Journal, LostRace
from tests.cluster.runs import environment

SECONDS = 60.0


def outcomes(part: str, directory: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.journal.journal_steps", part, str(directory)],
        env=environment(),
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_writer_killed_at_any_line_leaves_a_whole_entry_or_none(tmp_path):
    found = outcomes("journal", tmp_path)
    assert found.keys() == {"absent", "whole"}
    assert found["whole"] > 2, "also after it has its name, and before it is known to be durable"


@pytest.mark.full
@pytest.mark.slow
def test_coordinator_killed_at_any_line_announces_only_durable_records(tmp_path):
    """The next coordinator finds the epoch or decides it again, even if only one agent has it."""
    found = outcomes("coordinator", tmp_path)
    assert found.keys() == {"absent, 0 reached", *(f"whole, {count} reached" for count in range(3))}


class Schedule:
    """Runs writers one file-system call at a time, in an order given from outside."""

    def __init__(self, writers: list[Callable[[], None]]) -> None:
        self._go = [threading.Semaphore(0) for _ in writers]
        self._stopped = threading.Semaphore(0)
        self._number = threading.local()
        self._threads = [
            threading.Thread(target=self._run, args=(number, writer))
            for number, writer in enumerate(writers)
        ]
        self._ended = [False for _ in writers]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, writer: Callable[[], None]) -> None:
        self._number.value = number
        assert self._go[number].acquire(timeout=SECONDS)
        try:
            writer()
        finally:
            self._ended[number] = True
            self._stopped.release()

    def pause(self) -> None:
        """Before each call, in a writer's thread; elsewhere nothing."""
        number = getattr(self._number, "value", None)
        if number is not None:
            self._stopped.release()
            assert self._go[number].acquire(timeout=SECONDS)

    def alive(self) -> list[int]:
        return [number for number, ended in enumerate(self._ended) if not ended]

    def step(self, number: int) -> None:
        """Let a writer continue to its next call, or to its end."""
        self._go[number].release()
        assert self._stopped.acquire(timeout=SECONDS)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS)


_CALLS = ("open", "link", "stat")


@pytest.fixture
def paused(monkeypatch):
    """The schedule in the list is asked before each file-system call."""
    current: list[Schedule] = []

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if current:
                current[0].pause()
            return real(*given, **named)

        return call

    # Nothing is to be proved about disks, and a sync takes its time.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for name in _CALLS:
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))
    yield current
    current.clear()


def test_two_writers_in_every_order_of_their_calls(tmp_path, paused):
    """Exactly one wins, the other gets an error, and a reader always sees all of it or none."""
    waiting: list[list[int]] = [[]]
    tried = 0
    winners = set()
    while waiting:
        prefix = waiting.pop()
        directory = tmp_path / str(tried)
        tried += 1
        directory.mkdir()
        results: dict[int, str] = {}

        def write(number: int, directory: Path = directory, results: Any = results) -> None:
            try:
                Journal(directory).write("epoch", 1, {"by": number, "more": "x" * 100})
                results[number] = "won"
            except LostRace:
                results[number] = "lost"

        schedule = Schedule([lambda: write(0), lambda: write(1)])
        paused[:] = [schedule]
        taken: list[int] = []
        seen: list[Any] = []
        while alive := schedule.alive():
            chosen = prefix[len(taken)] if len(taken) < len(prefix) else alive[0]
            if len(taken) >= len(prefix) and len(alive) == 2:
                waiting.append([*taken, 1])
            schedule.step(chosen)
            taken.append(chosen)
            entry = Journal(directory).newest("epoch")
            if entry is not None:
                seen.append(entry[1]["by"])
        schedule.join()
        paused.clear()
        assert sorted(results.values()) == ["lost", "won"], taken
        (winner,) = (number for number, result in results.items() if result == "won")
        assert set(seen) == {winner}, "whole, and the same from its first moment on"
        assert [path.name for path in directory.iterdir()] == ["epoch-00000001.json"]
        winners.add(winner)
    assert tried > 30
    assert winners == {0, 1}
