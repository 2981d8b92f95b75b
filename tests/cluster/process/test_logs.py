"""Logs in memory, and files on a file system that hangs: who asks for them does not."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process.logs import Files, LocalLogs, LogCopier, read
from tests.common.waiting import until

SECONDS = 20.0


def files_of(directory: Path) -> Files:
    return Files(directory / "logs", directory / "target")


def hanging(directory: Path) -> tuple[Files, Path]:
    """Their thread hangs in a pipe until somebody opens that for writing."""
    os.mkfifo(hangs := directory / "hangs")
    files = files_of(directory)
    files._work.put(lambda: read(hangs, 0, 9))
    return files, hangs


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("0123456789")
    for start, nbytes, found in ((3, 4, "3456"), (-4, 9, "6789"), (-90, 2, "01")):
        assert read(tmp_path / "log", start, nbytes) == found
    assert read(tmp_path / "none", 0, 1) == ""


async def test_while_one_hangs_nobody_waits_and_then_everything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several texts for one file the newest counts; what fails is said."""
    file = tmp_path / "file"
    files, hangs = hanging(tmp_path)
    for number in range(100):
        files.replace(file, str(number))
    files.replace(tmp_path / "missing" / "file", "text")
    assert not file.exists()
    with open(hangs, "w"):
        pass  # the file system is back
    await until(lambda: file.exists() and file.read_text() == "99")
    files.replace(file, None)
    await files.close(SECONDS)
    assert not file.exists()
    assert "No such file or directory" in capsys.readouterr().err


async def test_its_end_does_not_wait_for_what_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, hangs = hanging(tmp_path)
    files.replace(tmp_path / "file", "text")
    await files.close(0.1)
    assert "not written within 0.1 s" in capsys.readouterr().err
    with open(hangs, "w"):
        pass


async def test_logs_are_copied_once_whoever_copies(tmp_path: Path) -> None:
    """They wait for a target that takes nothing; and a node's next agent, or who cleans up after
    it, leaves nothing out and nothing twice."""
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    copy = target / "one.log"
    logs.log("one").write_text("first\n")
    files = files_of(tmp_path)
    await asyncio.sleep(0.3)
    target.mkdir()
    copy.write_text("of an earlier run\n")
    await until(lambda: copy.read_text() == "of an earlier run\nfirst\n")
    with open(logs.log("one"), "a") as log:
        log.write("second\n")
    LogCopier(logs.directory, target).copy()
    with open(logs.log("one"), "a") as log:
        log.write("third\n")
    await files.close(SECONDS)
    assert copy.read_text() == "of an earlier run\nfirst\nsecond\nthird\n"


def test_the_log_of_a_process_that_has_ended_leaves_memory_once_it_is_copied(
    tmp_path: Path,
) -> None:
    """Each process that is started anew has a log of its own, and a run may start thousands."""
    logs, target = LocalLogs(tmp_path / "logs"), tmp_path / "target"
    for number in range(3):
        logs.log(f"member-{number}").write_text(f"last words of {number}\n")
    copier = LogCopier(logs.directory, target)
    for number in range(2):
        copier.is_over(f"member-{number}.log")
    assert "No such file or directory" in copier.copy()
    assert len(list(logs.directory.glob("*.log"))) == 3, "it is nowhere else yet"
    target.mkdir()
    assert copier.copy() == ""
    assert list(logs.directory.glob("*.log")) == [logs.log("member-2")]
    for number in range(3):
        assert (target / f"member-{number}.log").read_text() == f"last words of {number}\n"
    # As of a node that comes again: an old place in the log would leave its beginning out.
    logs.log("member-0").write_text("again\n")
    assert copier.copy() == ""
    assert (target / "member-0.log").read_text() == "last words of 0\nagain\n"


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
        copier = LogCopier(logs.directory, target)
        assert copier.copy() == ""
        text = (target / "one.log").read_bytes()
    missing = size - text.count(b"x")
    assert text.startswith(f"\n[{missing} bytes are missing here]\nxxx".encode())
    assert 20 << 20 < missing < size
