"""A moment's shortage is sat out; what lasts, or is something else, is told."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.agent.children.standby_keeper import StandbyKeeper
from deadpool_megatron.cluster.agent.members.members import Members
from deadpool_megatron.cluster.process import posix, shortage
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.cluster.process.shortage import patiently
from deadpool_megatron.cluster.process.starter import (
    ExecStarter,
    ForkStarter,
    StartedMember,
    Starter,
)
from deadpool_megatron.settings import Settings


class Short:
    """Fails so often before it works."""

    def __init__(self, times: int, number: int = errno.EAGAIN) -> None:
        self.left = times
        self.number = number
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.left > 0:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "FIRST_PAUSE_SECONDS", 0.001)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_shortage_is_sat_out(number: int) -> None:
    short = Short(3, number)
    asyncio.run(patiently(short, 60.0))
    assert short.calls == 4


def test_what_lasts_or_is_no_shortage_is_raised() -> None:
    with pytest.raises(BlockingIOError):
        asyncio.run(patiently(Short(1_000_000), 0.01))
    refused = Short(1, errno.EACCES)
    with pytest.raises(PermissionError):
        asyncio.run(patiently(refused, 60.0))
    assert refused.calls == 1


class Sleepers(Starter):
    """Members are processes that sleep; ``short`` is asked before each start."""

    def __init__(self, short: Short) -> None:
        self.short = short
        self.started: list[int] = []

    def start(self, spec: MemberSpec) -> StartedMember:
        self.short()
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        process.returncode = 0
        theirs.close()
        self.started.append(process.pid)
        return StartedMember(process.pid, ours)

    def prepare(self, slot: int) -> None:
        self.short()

    def close(self) -> None:
        pass


class Reports:
    def member_said(self, *_: Any) -> None:
        pass

    def member_frozen(self, *_: Any) -> None:
        pass

    def member_ended(self, *_: Any) -> None:
        pass


def members(starter: Starter) -> Members:
    def spec(slot: int, incarnation: int, _: object) -> MemberSpec:
        return MemberSpec(0, slot, incarnation, (), {}, Path(os.devnull), Path())

    return Members(spec, starter, Settings(), Reports())


async def test_member_starts_after_a_moment_without_processes_or_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a process that cannot be watched nothing is left before the next one starts."""
    no_handles, pidfd_open = Short(1, errno.EMFILE), os.pidfd_open

    def handle(pid: int) -> int:
        no_handles()
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", handle)
    starter = Sleepers(Short(2))
    node = members(starter)
    await patiently(lambda: node.start(0, 5, {}), 60.0)
    assert starter.short.calls == 4
    first, second = starter.started
    assert not posix.is_alive(first)
    assert node.by_slot[0].pid == second
    assert node.incarnations == {0: 5}
    node.prepare(0)
    await node.kill_all("the end", 20.0)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fork", "exec"])
def test_a_fork_that_fails_leaves_no_socket(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Tried again each second, it would soon take the last descriptor."""
    spec = MemberSpec(0, 0, 0, (), {}, Path(os.devnull), Path())
    starter: Starter = ForkStarter() if call == "fork" else ExecStarter((), lambda _: {})
    if call == "fork":
        monkeypatch.setattr(posix, "thread_count", lambda: 1)
        monkeypatch.setattr(os, "fork", Short(3))
    else:
        short = Short(3)
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: short())
    gc.collect()  # what an earlier test has left may be closed at any moment
    gc.disable()
    try:
        before = set(Path("/proc/self/fd").iterdir())
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                starter.start(spec)
        assert set(Path("/proc/self/fd").iterdir()) <= before
    finally:
        gc.enable()


def test_what_can_only_be_prepared_later_is_no_trouble() -> None:
    members(Sleepers(Short(1))).prepare(0)


async def test_standby_is_started_as_soon_as_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deadpool_megatron.cluster.agent.children.standby_keeper._RESTART_SECONDS", 0.01
    )
    pipe, short = os.pipe, Short(0, errno.EMFILE)

    def pipes() -> tuple[int, int]:
        short()
        return pipe()

    looks = asyncio.Event()
    line = "import os, sys, time; os.write(int(sys.argv[2]), b'%s'); time.sleep(60)"
    look = b'{"term": 1, "beat": "1 1", "at": 1.0, "node": null, "address": null}\\n'
    program = line % look.decode()
    keeper = StandbyKeeper(
        ("-c", program),
        str(tmp_path),
        "run",
        tmp_path / "log",
        on_look=lambda *_: looks.set(),
        on_over=lambda kept: None,
    )
    before = set(Path("/proc/self/fd").iterdir())
    short.left = 3
    monkeypatch.setattr(os, "pipe", pipes)
    keeper.start()
    # Nothing is left open; what an earlier test has left may be closed at any moment.
    assert set(Path("/proc/self/fd").iterdir()) <= before
    await asyncio.wait_for(looks.wait(), 20.0)
    assert short.left == 0
    await keeper.close(0.0)
