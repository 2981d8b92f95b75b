"""What NCCL says at a hang is kept as evidence; without an answer nothing waits or is told.

The server is a fake that speaks as NCCL's own does (src/ras/client_support.cc)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.agent.nccl_report import (
    MOST_BYTES,
    NcclReport,
    addresses,
    ask_nccl,
)
from deadpool_megatron.cluster.process.local_logs import LocalLogs
from tests.common.event_schema import check_event
from tests.common.ports import free_port

Told = list[dict[str, Any]]
_STATUS = b"Job summary\n  Communicators... (0.00s)\n    MISMATCH\n"


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


def heard(ras: FakeRas, monkeypatch: pytest.MonkeyPatch, limit_seconds: float = 20.0) -> bytes:
    """What it says to an agent whose environment names its address."""

    async def ask() -> bytes:
        server = await asyncio.start_server(ras.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{port}")
        try:
            return await ask_nccl(limit_seconds)
        finally:
            server.close()

    return asyncio.run(ask())


def test_the_status_of_the_job_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ras = FakeRas()
    assert heard(ras, monkeypatch) == _STATUS
    assert ras.commands == [b"timeout 1\n", b"verbose status\n"]


def test_what_was_said_within_the_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert heard(FakeRas(ends=False), monkeypatch, 0.5) == _STATUS
    assert time.monotonic() - began < 10.0


def test_no_more_is_read_than_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(heard(FakeRas(b"x" * (4 * MOST_BYTES), ends=False), monkeypatch)) <= MOST_BYTES


def test_where_nobody_listens_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{free_port()}")
    began = time.monotonic()
    assert asyncio.run(ask_nccl(20.0)) == b""
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("localhost:28028", [("127.0.0.1", 28028), ("::1", 28028)]),
        ("10.0.0.7:1", [("10.0.0.7", 1)]),
        ("[::1]:2", [("::1", 2)]),
        # It would have to be resolved, which may take long.
        ("node7:28028", []),
        ("28028", []),
        ("localhost:ras", []),
        ("localhost:65536", []),
        ("127.0.0.1:-1", []),
    ],
)
def test_the_address_is_that_of_nccls_variable(text: str, found: list[tuple[str, int]]) -> None:
    assert addresses(text) == found


def answering(said: bytes) -> Callable[[], Awaitable[bytes]]:
    async def ask() -> bytes:
        return said

    return ask


def taken(directory: Path, communicator: str, said: bytes) -> tuple[Told, list[Path]]:
    """What an agent tells the coordinator of it, and the logs there are then."""
    told: Told = []
    logs = LocalLogs(directory)
    report = NcclReport(2, communicator, logs, lambda one: told.append(dict(one)), answering(said))
    asyncio.run(report.take(3))
    return told, list(directory.iterdir())


def test_it_is_kept_among_the_logs_and_named(tmp_path: Path) -> None:
    [told], [log] = taken(tmp_path / "logs", "nccl", b"comm 1\n\x1b[2Jcomm 2\xff\n")
    check_event(told["event"])
    event = told["event"]
    assert (event["kind"], event["epoch"], event["node"]) == ("nccl-report", 3, 2)
    assert event["data"] == {"log": log.name}
    # Whoever listens there need not be NCCL.
    assert log.read_text() == "comm 1\n?[2Jcomm 2\N{REPLACEMENT CHARACTER}\n"


@pytest.mark.parametrize(("communicator", "said"), [("gloo", _STATUS), ("nccl", b"")])
def test_without_nccl_or_an_answer_nothing_is_told(
    tmp_path: Path, communicator: str, said: bytes
) -> None:
    assert taken(tmp_path / "logs", communicator, said) == ([], [])


def test_an_error_at_asking_ends_no_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ask() -> bytes:
        raise RuntimeError("not foreseen")

    logs = LocalLogs(tmp_path)
    asyncio.run(NcclReport(2, "nccl", logs, lambda one: None, ask).take(3))
    assert "not foreseen" in capsys.readouterr().err
