"""Reports that make the coordinator's own code raise: refused and counted, and nothing ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.service import Coordinator
from deadpool_megatron.cluster.journal.choice import open_journal
from deadpool_megatron.cluster.link.peers import AgentPeer
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.settings import Settings
from tests.cluster.journal.journal_steps import PipeWriter, coordinator

_SEAT = {"slot": 0, "incarnation": 0}


def hear(directory: Path, scenario: Callable[[Coordinator, AgentPeer], None]) -> Coordinator:
    """A coordinator that hears node 0, and goes on until nothing is left to do."""

    async def live() -> Coordinator:
        journal = open_journal(Settings(), "run", directory / "journal")
        one = coordinator(lambda name: journal, directory, "run")
        writer: Any = PipeWriter(1)
        peer = one._peers.agents[0] = AgentPeer(0, "boot", writer, "host", 0.0)
        scenario(one, peer)
        for _ in range(20):
            await asyncio.sleep(0.005)
        return one

    return asyncio.run(live())


@pytest.mark.parametrize(
    "message",
    [
        {"t": "event", "event": {"kind": "of-a-newer-version", "epoch": 1}},
        {"t": "event", "event": {"kind": "state-hash", "iteration": 1, "role": 0}},
        {"t": "member", **_SEAT, "m": {"t": "durable-request", "iteration": 3}},
        {"t": "member", **_SEAT, "m": {"t": "durable-request", "epoch": "x", "iteration": 3}},
        {"t": "member", **_SEAT, "m": {"t": "hello"}},
        {"t": "inventory", "inventory": {}},
    ],
    ids=lambda message: str(message)[:60],
)
def test_report_that_cannot_be_used_ends_nothing(
    tmp_path: Path, message: Mapping[str, Any]
) -> None:
    def scenario(one: Coordinator, peer: AgentPeer) -> None:
        one._peers._hand_over(peer, {**message, "n": 1}, one._peers._take)

    one = hear(tmp_path, scenario)
    assert one._peers.refusals == 1
    assert one._peers.taken(one._peers.agents[0]) == 1, "else its successor is told it again"
    assert not one._tasks


def test_input_that_the_machine_fails_at_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scenario(one: Coordinator, peer: AgentPeer) -> None:
        step, before = one._stepper._machine.step, one._state

        def fails_at_hellos(state: Any, item: inputs.Input, now: float) -> Any:
            assert not isinstance(item, inputs.MemberHello), "a mistake of ours"
            return step(state, item, now)

        monkeypatch.setattr(one._stepper._machine, "step", fails_at_hellos)
        hello = {"t": "member", **_SEAT, "m": {"t": "hello", "pid": 1}, "n": 1}
        one._peers._hand_over(peer, hello, one._peers._take)
        assert one._state is before
        one.feed(inputs.Tick())

    assert hear(tmp_path, scenario)._peers.refusals == 1


def test_beats_that_cannot_be_read_end_no_look(tmp_path: Path) -> None:
    def scenario(one: Coordinator, peer: AgentPeer) -> None:
        def broken(*_: object) -> None:
            raise TypeError("a beat of another version")

        del peer
        one._watchdog._hang = broken  # type: ignore[method-assign]
        one._spawn(one._watch())

    assert hear(tmp_path, scenario)._peers.refusals == 1
