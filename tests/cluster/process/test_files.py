"""Files on a file system that hangs: who asks for them does not."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import file_worker, posix
from deadpool_megatron.cluster.process.file_worker import LogCopier
from deadpool_megatron.cluster.process.files import FileWorker
from deadpool_megatron.cluster.process.local_logs import LocalLogs
from tests.common.waiting import until

SECONDS = 20.0


def working(tmp_path: Path, scenario: Callable[[FileWorker], Awaitable[None]]) -> None:
    """Run a scenario; nothing is left of the process afterwards."""

    async def run() -> None:
        worker = FileWorker(tmp_path / "logs", tmp_path / "target")
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
        assert await worker.read(log, 3, 4, SECONDS) == "3456"
        assert await worker.read(log, -4, 9, SECONDS) == "6789"
        assert await worker.read(tmp_path / "none", 0, 1, SECONDS) == ""
        worker.replace(file, "one")
        await done(worker)
        assert file.read_text() == "one"
        worker.replace(file, None)
        await done(worker)
        assert not file.exists()

    working(tmp_path, scenario)


def test_while_one_hangs_nobody_waits_and_then_everything_is_written(tmp_path: Path) -> None:
    """Of several texts for one file the newest counts."""
    hangs, file, log = hanging(tmp_path), tmp_path / "file", tmp_path / "log"
    log.write_text("words")

    async def scenario(worker: FileWorker) -> None:
        with pytest.raises(TimeoutError):
            await worker.read(hangs, 0, 9, 0.01)
        for number in range(100):
            worker.replace(file, str(number))
        with pytest.raises(TimeoutError):
            await worker.read(log, 0, 9, 0.01)
        assert not file.exists()
        with open(hangs, "w"):
            pass  # the file system is back
        assert await worker.read(log, 0, 9, SECONDS) == "words"
        await done(worker)
        assert file.read_text() == "99"

    working(tmp_path, scenario)


def test_its_end_does_not_wait_for_what_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = hanging(tmp_path)

    async def run() -> None:
        worker = FileWorker(tmp_path / "logs", tmp_path / "target")
        with pytest.raises(TimeoutError):
            await worker.read(hangs, 0, 9, 0.01)
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

    working(tmp_path, scenario)
    assert "No such file or directory" in capsys.readouterr().err


def test_another_process_follows_one_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("words")

    async def scenario(worker: FileWorker) -> None:
        hangs = hanging(tmp_path)
        reading = asyncio.create_task(worker.read(hangs, 0, 9, SECONDS))
        while worker._watch is None:
            await asyncio.sleep(0)
        worker._watch.kill()
        assert await reading == ""
        assert await worker.read(log, 0, 9, SECONDS) == "words"

    working(tmp_path, scenario)


def test_logs_are_copied_once_whoever_copies(tmp_path: Path) -> None:
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    target.mkdir()
    copy = target / "one.log"
    copy.write_text("of an earlier run\n")
    logs.log("one").write_text("first\n")

    async def scenario(worker: FileWorker) -> None:
        worker.replace(tmp_path / "file", "text")  # it runs from the first request on
        await until(lambda: copy.read_text() == "of an earlier run\nfirst\n")
        assert worker._watch is not None
        worker._watch.kill()
        await until(lambda: worker._watch is None)
        with open(logs.log("one"), "a") as log:
            log.write("second\n")
        await worker.copy_logs(SECONDS)
        assert copy.read_text() == "of an earlier run\nfirst\nsecond\n"

    working(tmp_path, scenario)


def test_a_log_is_copied_once_by_one_that_is_killed_as_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has copied it could not write down."""
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    target.mkdir()
    logs.log("one").write_text("first\n")
    LogCopier(logs.directory, target).copy()
    logs.log("one").write_text("first\nsecond\n")

    class Killed(BaseException):
        pass

    def write(descriptor: int, piece: bytes) -> int:
        real_write(descriptor, piece[:3])
        raise Killed

    def keep_nothing(_self: LogCopier, under_way: dict[str, int]) -> None:
        if under_way:
            real_keep(_self, under_way)

    real_write, real_keep = os.write, LogCopier._keep
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        patched.setattr(LogCopier, "_keep", keep_nothing)
        with pytest.raises(Killed):
            LogCopier(logs.directory, target).copy()
    assert LogCopier(logs.directory, target).copy() == ""
    assert (target / "one.log").read_text() == "first\nsecond\n"


def test_logs_wait_for_a_target_that_takes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    logs.log("one").write_text("words\n")

    async def scenario(worker: FileWorker) -> None:
        await worker.copy_logs(SECONDS)
        target.mkdir()  # there is room again
        await until((target / "one.log").exists)
        await worker.copy_logs(SECONDS)
        assert (target / "one.log").read_text() == "words\n"

    working(tmp_path, scenario)
    assert "No such file or directory" in capsys.readouterr().err


def test_the_log_of_a_process_that_has_ended_leaves_memory_once_it_is_copied(
    tmp_path: Path,
) -> None:
    """Each process that is started anew has a log of its own, and a run may start thousands."""
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    for number in range(3):
        logs.log(f"member-{number}").write_text(f"last words of {number}\n")

    async def scenario(worker: FileWorker) -> None:
        for number in range(2):
            worker.log_is_over(logs.log(f"member-{number}"))
        await worker.copy_logs(SECONDS)
        assert len(list(logs.directory.glob("*.log"))) == 3, "it is nowhere else yet"
        target.mkdir()
        await until(lambda: not logs.log("member-1").exists())
        await worker.copy_logs(SECONDS)
        assert list(logs.directory.glob("*.log")) == [logs.log("member-2")]
        for number in range(3):
            text = (target / f"member-{number}.log").read_text()
            assert text == f"last words of {number}\n"
        # As of a node that comes again: an old place in the log would leave its beginning out.
        logs.log("member-0").write_text("again\n")
        await worker.copy_logs(SECONDS)
        assert (target / "member-0.log").read_text() == "last words of 0\nagain\n"

    working(tmp_path, scenario)


def test_a_log_that_cannot_be_copied_keeps_none_of_the_others(tmp_path: Path) -> None:
    """As one that has come to the largest size that the user's limits allow."""
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    target.mkdir()
    names = [f"member-{number}" for number in range(6)]
    for name in names:
        logs.log(name).write_text("words\n")
    logs.log("member-3").write_bytes(b"x" * (1 << 20))
    copier = LogCopier(logs.directory, target)
    for name in names:
        copier.is_over(f"{name}.log")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        assert "File too large" in copier.copy()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(list(target.iterdir())) == len(names)
    assert list(logs.directory.glob("*.log")) == [logs.log("member-3")]
    assert copier.copy() == ""
    assert (target / "member-3.log").read_bytes() == b"x" * (1 << 20)
    assert not list(logs.directory.glob("*.log"))


def test_what_is_printed_last_is_copied_though_the_agent_is_killed(tmp_path: Path) -> None:
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    target.mkdir()
    worker = subprocess.Popen(
        [sys.executable, "-I", "-S", file_worker.__file__, logs.directory, target],
        stdin=subprocess.PIPE,
    )
    logs.log("one").write_text("last words\n")
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(SECONDS) == 0
    assert (target / "one.log").read_text() == "last words\n"


def test_a_log_that_is_not_copied_gives_its_oldest_part_up(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-logs-") as memory:
        logs, target = LocalLogs(Path(memory)), tmp_path / "target"
        target.mkdir()
        path = logs.log("one")
        size = 40 << 20
        with open(path, "wb") as log:
            for _ in range(40):
                log.write(b"x" * (1 << 20))
        logs.trim()
        assert path.stat().st_blocks * 512 <= 17 << 20
        copier = file_worker.LogCopier(logs.directory, target)
        assert copier.copy() == ""
        text = (target / "one.log").read_bytes()
    missing = size - text.count(b"x")
    assert text.startswith(f"\n[{missing} bytes are missing here]\nxxx".encode())
    assert 20 << 20 < missing < size


def test_a_host_without_descriptors_for_a_moment_trims_a_turn_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_descriptors(*_: object) -> None:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-logs-") as memory:
        logs = LocalLogs(Path(memory))
        path = logs.log("one")
        path.write_bytes(b"x" * (40 << 20))
        with monkeypatch.context() as shortage:
            shortage.setattr(Path, "glob", no_descriptors)
            logs.trim()
        logs._next = 0.0
        logs.trim()
        assert path.stat().st_blocks * 512 <= 17 << 20


def test_who_copies_last_leaves_nothing_out_and_nothing_twice(tmp_path: Path) -> None:
    """The node's own process, and who cleans up after it."""
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    target.mkdir()
    copiers = [file_worker.LogCopier(logs.directory, target) for _ in range(2)]
    for number in range(5):
        with open(logs.log("one"), "a") as log:
            log.write(f"line {number}\n" * 1000)
        threads = [threading.Thread(target=copier.copy) for copier in copiers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (target / "one.log").read_text() == logs.log("one").read_text()
