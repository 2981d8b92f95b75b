"""A close of an agent ends before the coordinator gives its node up, whatever hangs there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.agent.children.vault_keeper import VaultKeeper
from deadpool_megatron.cluster.agent.limits import CloseLimits
from deadpool_megatron.cluster.agent.service import Agent
from deadpool_megatron.cluster.process.liveness import ChildWatch
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.settings import NCCL_DEFAULTS, Settings
from tests.cluster.link.line import VirtualLoop


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


@pytest.mark.parametrize("settings", [Settings(), Settings(**NCCL_DEFAULTS)])
def test_everything_hangs_and_has_to_be_killed(settings: Settings) -> None:
    limits = CloseLimits.of(settings)
    assert limits.worst_seconds < settings.gather_seconds

    async def run() -> float:
        dying = 0.99 * limits.reap_seconds
        keeper: Any = object.__new__(VaultKeeper)
        keeper._node, keeper._settings, keeper._limits = 0, settings, limits
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
    assert 0.9 * limits.worst_seconds < took < settings.gather_seconds
