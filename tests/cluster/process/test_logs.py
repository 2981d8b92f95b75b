"""Logs in memory, and files on a file system that hangs: who asks for them does not."""

import os
import tempfile
from pathlib import Path

from deadpool_megatron.cluster.process.logs import Files, LocalLogs, LogCopier, read
from tests.common.wait import until

SECONDS = 20.0


def files_of(directory: Path) -> Files:
    return Files(directory / "logs", directory / "target")


def hanging(directory: Path) -> tuple[Files, Path]:
    """Their thread hangs in a pipe until somebody opens that for writing."""
    os.mkfifo(hangs := directory / "hangs")
    files = files_of(directory)
    files._work.put(lambda: read(hangs, 0, 9))
    return files, hangs


async def test_files_are_written_after_a_hang(tmp_path, capsys):
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


async def test_files_close_without_waiting_for_a_hang(tmp_path, capsys):
    files, hangs = hanging(tmp_path)
    files.replace(tmp_path / "file", "text")
    await files.close(0.1)
    assert "not written within 0.1 s" in capsys.readouterr().err
    with open(hangs, "w"):
        pass


def test_uncopied_log_loses_its_oldest_part(tmp_path):
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
