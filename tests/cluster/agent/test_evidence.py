"""What is kept as evidence when nothing moves; without an answer nothing waits or is told.

The server is a fake that speaks as NCCL's own does (src/ras/client_support.cc)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.agent import evidence
from deadpool_megatron.cluster.agent.evidence import (
    MOST_NCCL_BYTES,
    Stacks,
    ask_nccl,
    read_stacks,
    tell_what_nccl_says,
)
from deadpool_megatron.cluster.process.logs import LocalLogs
from tests.common.event_schema import check_event
from tests.common.ports import free_port
from tests.common.waiting import wait_for

_STANDS = """
import threading, time
from deadpool_megatron.cluster.process import posix
from tests.common.waiting import wait_for

def innermost():
    print("ready", flush=True)
    time.sleep(600)

def outer():
    innermost()

posix.answer_asks()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
outer()
"""
_DOES_NOT_LISTEN = "import time; print('ready', flush=True); time.sleep(600)"
_STATUS = b"Job summary\n  Communicators... (0.00s)\n    MISMATCH\n"


@contextmanager
def process(tmp_path: Path, program: str) -> Iterator[tuple[int, Path]]:
    log = tmp_path / "log"
    with open(log, "ab") as output:
        child = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=output)
    try:
        wait_for("a line of the child", lambda: b"ready" in log.read_bytes())
        yield child.pid, log
    finally:
        child.kill()
        child.wait()


def ask(pid: int, log: Path) -> Stacks:
    return asyncio.run(evidence.ask(pid, log, 30.0))


def test_main_thread_innermost_frame_first(tmp_path: Path) -> None:
    with process(tmp_path, _STANDS) as (pid, log):
        found = ask(pid, log)
        again = ask(pid, log)
    functions = [frame.split()[0] for frame in found.frames]
    assert functions == ["innermost", "outer", "<module>"]
    assert found.threads == 2
    assert found.missing == ""
    assert again == found, "the earlier answer in the log is not taken for this one"


def test_a_stopped_process_cannot_answer_and_is_not_waited_for(tmp_path: Path) -> None:
    with process(tmp_path, _STANDS) as (pid, log):
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert "stopped and cannot answer" in ask(pid, log).missing


def test_a_process_without_the_handler_is_not_ended_by_the_question(tmp_path: Path) -> None:
    with process(tmp_path, _DOES_NOT_LISTEN) as (pid, log):
        assert "does not answer" in ask(pid, log).missing
        os.kill(pid, 0)


def test_text_that_is_no_listing() -> None:
    assert read_stacks("whatever\n").missing


class FakeRas:
    """Answers one line after the other; ``ends``: whether the connection ends after the status."""

    def __init__(self, status: bytes = _STATUS, *, ends: bool = True) -> None:
        self.commands: list[bytes] = []
        self._status, self._ends = status, ends

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.commands.append(line)
            known = line == b"timeout 1\n"
            writer.write(b"OK\n" if known else self._status)
            await writer.drain()
            if not known and self._ends:
                break
        writer.close()


def heard(ras: FakeRas, monkeypatch: pytest.MonkeyPatch, host: str = "localhost") -> bytes:
    """What it says to an agent whose environment names its address."""

    async def ask() -> bytes:
        server = await asyncio.start_server(ras.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("NCCL_RAS_ADDR", f"{host}:{port}")
        try:
            return await asyncio.to_thread(ask_nccl)
        finally:
            server.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_status_of_the_job_is_asked_for(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    ras = FakeRas()
    assert heard(ras, monkeypatch, host) == _STATUS
    assert ras.commands == [b"timeout 1\n", b"verbose status\n"]


def test_what_was_said_within_the_limit_counts_and_no_more_than_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evidence, "_NCCL_SECONDS", 0.5)
    assert heard(FakeRas(ends=False), monkeypatch) == _STATUS
    large = FakeRas(b"x" * (4 * MOST_NCCL_BYTES), ends=False)
    assert len(heard(large, monkeypatch)) <= MOST_NCCL_BYTES


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{port}", "28028", "localhost:ras", "localhost:65536", "127.0.0.1:-1"]
)
def test_where_nobody_listens_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", address.format(port=free_port()))
    began = time.monotonic()
    assert ask_nccl() == b""
    assert time.monotonic() - began < 10.0


def told_of(directory: Path, monkeypatch: pytest.MonkeyPatch, said: bytes) -> list[Any]:
    """What the coordinator is told of it."""
    told: list[Any] = []
    monkeypatch.setattr(evidence, "ask_nccl", lambda: said)
    asyncio.run(tell_what_nccl_says(2, 3, LocalLogs(directory), told.append))
    return told


def test_it_is_kept_among_the_logs_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [told] = told_of(tmp_path, monkeypatch, b"comm 1\n\x1b[2Jcomm 2\xff\n")
    [log] = tmp_path.iterdir()
    event = told["event"]
    check_event(event)
    assert (event["kind"], event["epoch"], event["node"]) == ("nccl-report", 3, 2)
    assert event["data"] == {"log": log.name}
    # Whoever listens there need not be NCCL.
    assert log.read_text() == "comm 1\n?[2Jcomm 2\N{REPLACEMENT CHARACTER}\n"


def test_without_an_answer_or_a_place_for_it_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told_of(tmp_path, monkeypatch, b"") == []
    (tmp_path / "node2-nccl-3.log").mkdir()
    assert told_of(tmp_path, monkeypatch, _STATUS) == []
