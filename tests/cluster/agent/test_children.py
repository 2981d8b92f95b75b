"""An agent's vault, standby and look at its host: told in clear reports, never waited for."""

import asyncio
import os
import signal
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from deadpool_megatron.cluster.agent import node_checker as module, vault_process as vault_keeper
from deadpool_megatron.cluster.agent.members import Member
from deadpool_megatron.cluster.agent.node_checker import NodeChecker
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.agent.vault_process import VaultSupervisor
from deadpool_megatron.cluster.process.children import ChildWatch, ProcessEnd
from deadpool_megatron.cluster.process.fork_server import StartedMember
from deadpool_megatron.cluster.process.logs import LocalLogs
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout import records
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from tests.common.virtual_time import VirtualLoop
from tests.common.wait import until

T = TypeVar("T")
EPOCH = 3
HELD = records.Inventory(
    0, EPOCH, (records.Holding(0, records.Generation(1, 7), frozenset({"shard0"})),)
)
FACTS = HostFacts("at the start", noted="an earlier run put it aside")


class Watch:
    """Of a vault that does nothing; ``dies_after_seconds``: how long a kill takes to end it."""

    pid = 1 << 30
    end = ChildWatch.end

    def __init__(self, dies_after_seconds: float = 0.0) -> None:
        self.ended = asyncio.Event()
        self.ending: ProcessEnd | None = None
        self.kills = 0
        self._dies_after_seconds = dies_after_seconds

    def kill(self) -> None:
        self.kills += 1
        if self._dies_after_seconds:
            asyncio.get_running_loop().call_later(self._dies_after_seconds, self._die)
        else:
            self._die()

    def _die(self) -> None:
        self.ending = ProcessEnd(signal=signal.SIGKILL)
        self.ended.set()


class Control:
    """The control connection of a vault that is up. ``orders``: what it is ordered; ``closes`` and
    ``tells``: whether it does that, or takes all the time that it has for it."""

    def __init__(self, closes: bool = True, tells: bool = True) -> None:
        self._closes, self._tells = closes, tells
        self.orders: list[str] = []

    async def close_epoch(self, epoch: int, limit_seconds: float) -> None:
        await self._answer(self._closes, limit_seconds)
        self.orders.append(f"close {epoch}")

    async def adopt(self, record: records.EpochRecord, _: float) -> None:
        self.orders.append(f"adopt {record.epoch}")

    async def status(self, _: float) -> dict[str, object]:
        return {}

    async def inventory(self, limit_seconds: float) -> records.Inventory:
        await self._answer(self._tells, limit_seconds)
        return HELD

    async def close(self) -> None:
        pass

    async def _answer(self, answers: bool, limit_seconds: float) -> None:
        if not answers:
            await asyncio.sleep(limit_seconds)
            raise TimeoutError("no answer")


def in_no_time(life: Coroutine[Any, Any, T]) -> T:
    """Run it in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(life)


@pytest.fixture
def info():
    return RunInfo(
        run_id=f"keeper-{os.getpid()}",
        world_size=1,
        nodes=1,
        spares=0,
        nproc_per_node=1,
        command=("x",),
        settings=Settings(),
    )


def options_of(run: RunDirectory, info: RunInfo) -> AgentOptions:
    """Of node 0."""
    places: Any = {"run": run, "info": info, "directory": run.path.parent}
    how: Any = {"secret": b"", "host": "127.0.0.1", "domain": "", "server": None, "modules": ()}
    return AgentOptions(0, **places, **how)


@pytest.fixture
def keeper(tmp_path, info):
    run, segments = RunDirectory(tmp_path / "run"), tmp_path / "segments"
    run.create(info)
    segments.mkdir()
    options: Any = SimpleNamespace(**vars(options_of(run, info)), segments=segments)
    logs = LocalLogs(segments / "logs")
    made = VaultSupervisor(options, lambda _: None, lambda: None, logs)
    yield made
    made._tcp.close()
    made._unix.close()


def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that are over at once."""
    for name in ("_FIRST_PAUSE_SECONDS", "_LONGEST_PAUSE_SECONDS", "_SHORTAGE_SECONDS"):
        monkeypatch.setattr(vault_keeper, name, 0.001)


def note_starts(monkeypatch: pytest.MonkeyPatch, dies_after_seconds: float = 0.0) -> list[Watch]:
    """The vaults that have been started, each as its watch."""
    started: list[Watch] = []

    def start(*_: object, **__: object) -> Watch:
        started.append(Watch(dies_after_seconds))
        return started[-1]

    monkeypatch.setattr(vault_keeper, "start_child", start)
    return started


def examiner(
    directory: Path, seat: int, *command: str, settings: Settings | None = None
) -> tuple[Any, list[Any]]:
    """Of node 0 in an epoch whose only role is on node ``seat``."""
    info = RunInfo("testrun", 1, 1, 1, 1, (), settings or Settings())
    run = RunDirectory(directory)
    sent: list[Any] = []
    options = replace(options_of(run, info), facts=FACTS)
    seats = {0: records.Seat(seat, 0, 0)}
    nodes = {0: records.NodeAddress("127.0.0.1", 1, "node0", spare=seat != 0)}
    record = records.EpochRecord(
        1, seats, nodes, records.Restore("initial", records.Generation(1, 0))
    )
    made = NodeChecker(options, sent.append, lambda: record, command)
    return made, sent


@pytest.fixture
def segments(tmp_path, monkeypatch):
    monkeypatch.setattr(AgentOptions, "segments", property(lambda _: tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("seat", "health", "looks"), [(1, "", True), (0, "", False), (0, "check_node", True)]
)
async def test_a_spare_looks_again_a_node_that_trains_only_at_its_health(
    seat, health, looks, segments, monkeypatch
):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    made, sent = examiner(segments, seat, settings=Settings(health_command=health))
    looked = 0

    async def look() -> None:
        nonlocal looked
        looked += 1

    made.look = look
    running = asyncio.create_task(made.run())
    for _ in range(20):
        await asyncio.sleep(0)
    running.cancel()
    assert bool(looked) == looks
    assert sent == []


def test_facts_are_read_by_a_process_of_its_own(segments):
    made, sent = examiner(segments, 1, "deadpool_megatron", "check", "--json")
    asyncio.run(made.look())
    assert sent[0]["t"] == "facts"
    told = HostFacts.from_dict(sent[0]["facts"])
    assert (told.address, told.noted) == ("127.0.0.1", FACTS.noted)
    assert made.facts() == sent[0]["facts"]


__all__ = ["info", "keeper"]


@contextmanager
def talking(directory: Path, reports: Any) -> Iterator[tuple[Member, socket.socket]]:
    """A member of slot 0, and its process's end of their connection."""
    ours, theirs = socket.socketpair()
    watch: Any = SimpleNamespace(pid=os.getpid(), then=lambda _: None)
    spec = MemberSpec(MemberPlace(0, 0, 0), ("x",), {}, directory / "log", directory)
    yield Member(spec, StartedMember(watch, ours), Settings(), reports), theirs
    asyncio.get_running_loop().remove_reader(ours.fileno())
    ours.close()
    theirs.close()


async def test_who_left_an_older_epoch_is_waited_for(tmp_path):
    """What a member has said of that, late or twice, says nothing of the one that is closed now."""
    told: list[Any] = []
    reports = SimpleNamespace(member_reported=lambda member, message: told.append(message))
    with talking(tmp_path, reports) as (member, process):
        assert member.drained(1) is None
        for count, clean in enumerate((True, True, False), 1):
            framing.send(process, {"t": "drained", "epoch": 2, "clean": clean})
            await until(lambda count=count: len(told) == count)  # type: ignore[misc]
            assert [member.drained(epoch) for epoch in (1, 2, 3)] == [clean, clean, None]
            assert member.reports_since(2) == []
