"""Orders of coordinators to an agent: their sequence and limits; where it looks for others."""

import asyncio
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.agent.agent import Agent
from deadpool_megatron.cluster.agent.coordinator_address import CoordinatorAddress
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.control import VaultControl
from tests.cluster.agent import test_children
from tests.cluster.agent.test_children import Control, Watch, in_no_time, info, keeper, note_starts
from tests.common.wait import until

__all__ = ["info", "keeper"]


class Stuck(Watch):
    """A member that never leaves an epoch, and takes its time to die."""

    local_rank, incarnation = 0, 0

    def drained(self, epoch: int) -> None:
        return None

    def kill(self, cause: str = "") -> None:
        super().kill()


@pytest.mark.parametrize("settings", [Settings(), Settings(communicator="nccl")])
def test_everything_hangs_and_has_to_be_killed(keeper, info, monkeypatch, settings):
    """The vault at its close, and each one after it when it is asked what it holds."""
    worst_seconds = settings.close_seconds + 7 * settings.stage_seconds
    assert worst_seconds < settings.gather_seconds
    test_children.short(monkeypatch)
    dying = 0.99 * settings.stage_seconds
    note_starts(monkeypatch, dying)
    controls = [Control(closes=False), *(Control(tells=False) for _ in range(3))]

    async def connect(*_: object) -> Control:
        return controls.pop(0)

    monkeypatch.setattr(VaultControl, "connect", connect)
    keeper._settings = settings
    told: list[Any] = []

    async def run() -> float:
        agent: Any = Agent(
            test_children.options_of(keeper._options.run, replace(info, settings=settings))
        )
        members = SimpleNamespace(by_local_rank={0: Stuck(dying)}, send_all=lambda message: None)
        vars(agent).update(
            _vault=keeper,
            _drained=asyncio.Event(),
            _store=SimpleNamespace(enter=lambda epoch: None),
            _record=SimpleNamespace(seats={0: Seat(0, 0, 0)}),
            _members=members,
            _link=SimpleNamespace(send=told.append),
        )
        await keeper.start()
        supervising = asyncio.create_task(keeper.supervise())
        await keeper._ready.wait()
        began = asyncio.get_running_loop().time()
        await agent._close(1, "a failure")
        supervising.cancel()
        return asyncio.get_running_loop().time() - began

    took = in_no_time(run())
    assert [report["t"] for report in told] == ["inventory"]
    assert 0.9 * worst_seconds < took < settings.gather_seconds


async def test_a_run_directory_that_hangs_does_not_hold_the_agent_up(tmp_path):
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


async def test_the_newest_that_is_known_counts(tmp_path):
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
