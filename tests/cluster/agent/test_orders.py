"""Orders of coordinators to an agent: their sequence and limits; where it looks for others."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.agent.agent import Agent
from deadpool_megatron.cluster.agent.contact import CoordinatorAddress, StandbyKeeper
from deadpool_megatron.cluster.agent.members import Member, NodeMembers
from deadpool_megatron.cluster.agent.vault_process import VaultKeeper
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.children import ChildWatch, ProcessEnd
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.settings import Settings
from tests.cluster.link.line import VirtualLoop
from tests.common.waiting import until


async def test_what_is_closed_is_told_while_a_dump_is_written() -> None:
    """To the next coordinator, which gives up nodes that do not answer its close in time."""
    agent: Any = object.__new__(Agent)
    agent._closed, agent._inventory = 3, {"epoch": 3, "holdings": []}
    agent._orders = asyncio.Queue()
    sent: list[dict[str, Any]] = []
    agent._link = SimpleNamespace(send=sent.append)
    agent._on_order({"t": "close", "epoch": 3, "cause": "a takeover"})
    assert agent._orders.empty(), "behind the dump that is under way"
    assert sent == [{"t": "inventory", "epoch": 3, "inventory": agent._inventory}]
    agent._on_order({"t": "close", "epoch": 4, "cause": "a fault"})
    agent._orders.get_nowait().close()
    assert len(sent) == 1, "that one is behind the record it closes"


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_run_leaves_in_memory_stays_though_the_order_to_stop_was_lost(kept: bool) -> None:
    agent: Any = object.__new__(Agent)
    agent._link = SimpleNamespace(connected=False)
    ended: list[tuple[str, bool]] = []
    agent._end = lambda reason, remove: ended.append((reason, remove))
    keeper: Any = object.__new__(StandbyKeeper)
    keeper._on_over = agent._run_over
    keeper._take({"over": True, "kept": kept})
    assert ended == [("the run is over", not kept)]


@pytest.mark.parametrize("ended", [False, True])
def test_the_process_id_of_a_vault_that_has_ended_is_sent_nothing(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """It may be that of any other process by now."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(posix, "kill", lambda *one: sent.append(one))
    keeper: Any = object.__new__(VaultKeeper)
    ending = ProcessEnd(signal=signal.SIGKILL) if ended else None
    keeper._watch = SimpleNamespace(pid=1 << 30, ending=ending)
    agent: Any = object.__new__(Agent)
    agent._vault, agent._members = keeper, object.__new__(NodeMembers)
    agent._members.by_slot = {}
    agent._on_order({"t": "signal-part", "part": "vault", "number": 0, "signal": "KILL"})
    assert sent == ([] if ended else [(1 << 30, signal.SIGKILL)])


def test_the_log_of_a_member_that_has_ended_does_not_stay_in_memory() -> None:
    agent: Any = object.__new__(Agent)
    over: list[str] = []
    agent._members = SimpleNamespace(remove=lambda member: None)
    agent._files = SimpleNamespace(log_is_over=over.append)
    agent._drained, agent._ending = asyncio.Event(), ("the run is over", True)
    agent.member_ended(SimpleNamespace(log="node0-slot0-3.log"), ProcessEnd(exit_code=0), "", False)
    assert over == ["node0-slot0-3.log"]


class Silent:
    """A vault that says nothing, and takes its time to die."""

    end = ChildWatch.end

    def __init__(self, dies_after_seconds: float) -> None:
        self._dies_after_seconds = dies_after_seconds
        self.pid = 1
        self.ended = asyncio.Event()
        self.ending = None

    def kill(self) -> None:
        asyncio.get_running_loop().call_later(self._dies_after_seconds, self.ended.set)

    async def close_epoch(self, epoch: int, limit_seconds: float) -> None:
        await asyncio.wait_for(asyncio.Event().wait(), limit_seconds)

    async def inventory(self, limit_seconds: float) -> None:
        await asyncio.wait_for(asyncio.Event().wait(), limit_seconds)


class Stuck:
    """A member that never leaves an epoch, and takes its time to die."""

    slot, incarnation, pid = 0, 0, 1

    def __init__(self, dies_after_seconds: float) -> None:
        self._dies_after_seconds = dies_after_seconds
        self.ended = asyncio.Event()

    def send(self, message: object) -> None:
        pass

    def drained(self, epoch: int) -> None:
        return None

    def kill(self, cause: str) -> None:
        asyncio.get_running_loop().call_later(self._dies_after_seconds, self.ended.set)


@pytest.mark.parametrize("settings", [Settings(), Settings(communicator="nccl")])
def test_everything_hangs_and_has_to_be_killed(settings: Settings) -> None:
    worst_seconds = settings.close_seconds + 7 * settings.stage_seconds
    assert worst_seconds < settings.gather_seconds

    async def run() -> float:
        dying = 0.99 * settings.stage_seconds
        keeper: Any = object.__new__(VaultKeeper)
        keeper._node, keeper._settings = 0, settings
        keeper._closed, keeper._ready = 0, asyncio.Event()
        keeper._log = lambda text: None

        async def another() -> None:
            """Instead of supervise(): the next vault is up as soon as the one before is dead."""
            for _ in range(3):
                keeper._watch = keeper._control = Silent(dying)
                keeper._ready.set()
                await keeper._watch.ended.wait()

        supervising = asyncio.create_task(another())
        await asyncio.sleep(0)
        agent: Any = object.__new__(Agent)
        member = Stuck(dying)
        agent._node, agent._settings, agent._vault = 0, settings, keeper
        agent._closed, agent._inventory, agent._drained = 0, None, asyncio.Event()
        agent._store = SimpleNamespace(enter=lambda epoch: None)
        agent._record = SimpleNamespace(seats={0: Seat(0, 0, 0)})
        agent._members = SimpleNamespace(by_slot={0: member}, send_all=lambda message: None)
        told: list[Any] = []
        agent._link = SimpleNamespace(send=told.append)
        began = asyncio.get_running_loop().time()
        await agent._close(1, "a failure")
        supervising.cancel()
        assert [report["t"] for report in told] == ["inventory"]
        return asyncio.get_running_loop().time() - began

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        took = runner.run(run())
    assert 0.9 * worst_seconds < took < settings.gather_seconds


async def test_a_run_directory_that_hangs_does_not_hold_the_agent_up(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    os.mkfifo(run.coordinator)
    address = CoordinatorAddress(run, None, seen=lambda: None)
    began = time.monotonic()
    for _ in range(3):
        assert address.newest() is None
        await asyncio.sleep(0.1)
    assert time.monotonic() - began < 2.0
    writer = os.open(run.coordinator, os.O_WRONLY)  # somebody waits to read
    write_json(run.coordinator, {"host": "here", "port": 7})
    os.close(writer)
    await until(lambda: address.newest() == ("here", 7))


async def test_the_newest_that_is_known_counts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seen: list[tuple[str, int]] = []
    fixed = ("fixed", 1)
    address = CoordinatorAddress(run, fixed, seen=lambda: seen[-1] if seen else None)
    assert address.newest() == fixed
    write_json(run.coordinator, {"host": "told", "port": 2})
    await until(lambda: address.newest() == ("told", 2))
    run.coordinator.write_text("{")
    await asyncio.sleep(0.05)
    assert address.newest() == ("told", 2), "what cannot be read says nothing"
    seen.append(("seen", 3))
    assert address.newest() == ("seen", 3)


class Node:
    """An agent with one member. ``told``: what its coordinator hears of that."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.ordered: list[Mapping[str, Any]] = []
        agent: Any = object.__new__(Agent)
        members: Any = object.__new__(NodeMembers)
        member: Any = object.__new__(Member)
        member.slot, member.incarnation, member.said = 0, 0, {}
        member.freeze = SimpleNamespace(beat=lambda now: None)
        member._reports = agent
        member._pipe = SimpleNamespace(send=self.ordered.append)
        members.by_slot, members._node = {0: member}, 3
        members._send = lambda report: self.told.append(report["m"])
        agent._boot, agent._closed, agent._record, agent._members = "", 0, None, members
        agent._node = 3
        agent._exports = SimpleNamespace(drop=lambda: None)
        agent._store = SimpleNamespace(repeat=lambda: None)
        self.agent, self.member = agent, member
        self.meet("first")

    def meet(self, boot: str) -> None:
        self.told.clear()
        self.agent._on_order({"t": "welcome", "boot": boot, "record": None})

    def ask(self, iteration: int, epoch: int = 1) -> dict[str, Any]:
        request = {"t": "durable-request", "epoch": epoch, "iteration": iteration}
        self.member._message(request)
        return request

    def done(self, iteration: int) -> None:
        order = {"t": "durable-done", "iteration": iteration}
        self.agent._on_order(order)
        assert self.ordered[-1] == order


def test_a_save_that_waits_is_told_to_each_coordinator_until_it_is_valid() -> None:
    """The one that was asked may have died in the sync of its files, long after it said yes."""
    node = Node()
    request = node.ask(10)
    node.meet("second")
    assert node.told == [request]
    node.done(5)
    node.meet("third")
    assert node.told == [request], "that was the answer to an earlier request"
    node.done(10)
    node.meet("fourth")
    assert node.told == []
