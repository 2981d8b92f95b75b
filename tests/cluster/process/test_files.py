"""Files on a file system that hangs: who asks for them does not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.files import FileWorker

SECONDS = 20.0


def working(scenario: Callable[[FileWorker], Awaitable[None]]) -> None:
    """Run a scenario; nothing is left of the process afterwards."""

    async def run() -> None:
        worker = FileWorker()
        try:
            await asyncio.wait_for(scenario(worker), SECONDS)
        finally:
            watch = worker._watch
            await worker.close(SECONDS)
        assert watch is None or not posix.is_alive(watch.pid)

    asyncio.run(run())


async def done(worker: FileWorker) -> None:
    await asyncio.wait_for(worker._idle.wait(), SECONDS)


def hanging(tmp_path: Path) -> Path:
    """A file whose reading hangs until somebody opens it for writing."""
    path = tmp_path / "hangs"
    os.mkfifo(path)
    return path


def test_reads_writes_and_removes(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "file"
    log.write_text("0123456789")

    async def scenario(worker: FileWorker) -> None:
        assert await worker.size(log, SECONDS) == 10
        assert await worker.read(log, 3, 4, SECONDS) == "3456"
        assert await worker.tail(log, SECONDS) == "0123456789"
        assert await worker.tail(tmp_path / "none", SECONDS) == ""
        worker.replace(file, "one")
        await done(worker)
        assert file.read_text() == "one"
        worker.replace(file, None)
        await done(worker)
        assert not file.exists()

    working(scenario)


def test_while_one_hangs_nobody_waits_and_then_everything_is_written(tmp_path: Path) -> None:
    """Of several texts for one file the newest counts."""
    hangs, file, log = hanging(tmp_path), tmp_path / "file", tmp_path / "log"
    log.write_text("words")

    async def scenario(worker: FileWorker) -> None:
        assert await worker.tail(hangs, 0.01) == ""
        with pytest.raises(TimeoutError):
            await worker.size(log, 0.01)
        for number in range(100):
            worker.replace(file, str(number))
        assert await worker.tail(log, 0.01) == ""
        assert not file.exists()
        with open(hangs, "w"):
            pass  # the file system is back
        assert await worker.tail(log, SECONDS) == "words"
        await done(worker)
        assert file.read_text() == "99"

    working(scenario)


def test_its_end_does_not_wait_for_what_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = hanging(tmp_path)

    async def run() -> None:
        worker = FileWorker()
        assert await worker.tail(hangs, 0.01) == ""
        worker.replace(tmp_path / "file", "text")
        watch = worker._watch
        assert watch is not None
        await worker.close(0.5)
        assert not posix.is_alive(watch.pid)

    asyncio.run(run())
    assert "not written within 0.5 s" in capsys.readouterr().err


def test_what_fails_is_said_and_the_next_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(worker: FileWorker) -> None:
        worker.replace(tmp_path / "missing" / "file", "text")
        worker.replace(tmp_path / "file", "text")
        await done(worker)
        assert (tmp_path / "file").read_text() == "text"

    working(scenario)
    assert "No such file or directory" in capsys.readouterr().err


def test_another_process_follows_one_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("words")

    async def scenario(worker: FileWorker) -> None:
        hangs = hanging(tmp_path)
        reading = asyncio.create_task(worker.tail(hangs, SECONDS))
        while worker._watch is None:
            await asyncio.sleep(0)
        worker._watch.kill()
        assert await reading == ""
        assert await worker.tail(log, SECONDS) == "words"

    working(scenario)
