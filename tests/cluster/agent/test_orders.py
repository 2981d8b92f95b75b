"""The order in which an agent does what coordinators say."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.agent import hurting
from deadpool_megatron.cluster.agent.children.leaving import EXIT_TERMINATED, Leaving
from deadpool_megatron.cluster.agent.children.standby_keeper import StandbyKeeper
from deadpool_megatron.cluster.agent.children.vault_keeper import VaultKeeper
from deadpool_megatron.cluster.agent.service import EXIT_FENCED, Agent
from deadpool_megatron.cluster.process.liveness import Ending


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


async def test_nccl_is_asked_before_the_epoch_is_closed() -> None:
    """The close has the members abort, and then there is nothing left to tell."""
    done: list[str] = []

    async def note(what: str) -> None:
        done.append(what)

    agent: Any = object.__new__(Agent)
    agent._closed, agent._orders = 3, asyncio.Queue()
    agent._nccl = SimpleNamespace(take=lambda epoch: note(f"ask {epoch}"))
    agent._close = lambda epoch, cause: note(f"close {epoch}")
    agent._on_order({"t": "ask-nccl", "epoch": 4})
    agent._on_order({"t": "close", "epoch": 4, "cause": "nothing moves"})
    while not agent._orders.empty():
        await agent._orders.get_nowait()
    assert done == ["ask 4", "close 4"]


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
    monkeypatch.setattr(hurting.os, "kill", lambda *one: sent.append(one))
    keeper: Any = object.__new__(VaultKeeper)
    ending = Ending(signal_name="SIGKILL") if ended else None
    keeper._watch = SimpleNamespace(pid=1 << 30, ending=ending)
    agent: Any = object.__new__(Agent)
    agent._vault, agent._members = keeper, SimpleNamespace(by_slot={})
    agent._on_order({"t": "hurt", "part": "vault", "number": 0, "signal": "KILL"})
    assert sent == ([] if ended else [(1 << 30, signal.SIGKILL)])


@pytest.mark.parametrize("is_fenced_first", [True, False])
def test_who_is_told_to_end_and_is_fenced_does_not_come_back(is_fenced_first: bool) -> None:
    """The signal is not lost, whichever comes first: another agent after this one would not get it,
    and nobody would take up the slots."""

    async def end() -> tuple[int, tuple[str, bool]]:
        agent: Any = object.__new__(Agent)
        options: Any = SimpleNamespace(leave_seconds=0.0, keeps_slots=True, node=3)
        agent._members = SimpleNamespace(by_slot={}, send_all=lambda message: None)
        agent._node, agent._options, agent._exit_code, agent._ending = 3, options, 0, None
        agent._stopping, told = asyncio.Event(), asyncio.Event()
        agent._leaving = Leaving(options, told.set)
        if is_fenced_first:
            agent._fence("cut off")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(told.wait(), 20)
        if not is_fenced_first:
            agent._fence("cut off")
        assert agent._exit_code == EXIT_FENCED
        return agent._leaving.status(agent._exit_code), agent._ending

    status, (_, is_removed) = asyncio.run(end())
    assert status == EXIT_TERMINATED
    assert is_removed != is_fenced_first


def test_the_log_of_a_member_that_has_ended_does_not_stay_in_memory() -> None:
    agent: Any = object.__new__(Agent)
    over: list[str] = []
    agent._members = SimpleNamespace(remove=lambda member: None)
    agent._files = SimpleNamespace(log_is_over=over.append)
    agent._drained, agent._ending = asyncio.Event(), ("the run is over", True)
    agent.member_ended(SimpleNamespace(log="node0-slot0-3.log"), Ending(exit_code=0), "", False)
    assert over == ["node0-slot0-3.log"]
