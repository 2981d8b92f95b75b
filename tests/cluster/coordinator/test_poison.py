"""Reports that make the coordinator's own code raise: refused and counted, and nothing ends."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import stepper as stepping
from deadpool_megatron.cluster.coordinator.service import Coordinator
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.link.peers import AgentPeer
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.events import Event, Kind
from tests.cluster.coordinator.asked import deliver
from tests.cluster.journal.journal_steps import PipeWriter, coordinator
from tests.cluster.machine.rig import Rig, g, killed

_SEAT = {"slot": 0, "incarnation": 0}


def hear(directory: Path, scenario: Callable[[Coordinator, AgentPeer], None]) -> Coordinator:
    """A coordinator that hears node 0, and goes on until nothing is left to do."""

    async def live() -> Coordinator:
        journal = Journal(directory / "journal")
        one = coordinator(lambda name: journal, directory, "run")
        writer: Any = PipeWriter(1)
        peer = one.peers.agents[0] = AgentPeer(0, "boot", writer, 0.0)
        scenario(one, peer)
        for _ in range(20):
            await asyncio.sleep(0.005)
        return one

    return asyncio.run(live())


@pytest.mark.parametrize(
    "message",
    [
        {"t": "event", "event": {"kind": "of-a-newer-version", "epoch": 1}},
        {"t": "progress", "event": {"kind": "state-hash", "iteration": 1, "role": 0}},
        {"t": "member", **_SEAT, "m": {"t": "durable-request", "iteration": 3}},
        {"t": "member", **_SEAT, "m": {"t": "durable-request", "epoch": "x", "iteration": 3}},
        {"t": "member", **_SEAT, "m": {"t": "paused"}},
        {"t": "inventory", "inventory": {}},
    ],
    ids=lambda message: str(message)[:60],
)
def test_report_that_cannot_be_used_ends_nothing(tmp_path, message):
    def scenario(one: Coordinator, peer: AgentPeer) -> None:
        deliver(one.peers, peer, {**message, "n": 1})

    one = hear(tmp_path, scenario)
    assert one.peers.refusals == 1
    assert one.peers.taken(one.peers.agents[0]) == 1, "else its successor is told it again"
    assert not one.tasks


def test_report_that_the_machine_fails_at_is_refused_and_ends_this_coordinator(
    tmp_path, monkeypatch
):
    """Its state may be half changed; the successor is not told it again, and reads the journal."""
    ended, handled = list[BaseException](), list[inputs.Input]()
    monkeypatch.setattr(stepping, "_REFUSAL_SECONDS", 0.02)
    monkeypatch.setattr(stepping, "end_process", ended.append)

    def scenario(one: Coordinator, peer: AgentPeer) -> None:
        def fails(item: inputs.Input, _: float) -> Any:
            handled.append(item)
            raise KeyError("a mistake of ours")

        monkeypatch.setattr(one._stepper._machine, "handle", fails)
        hello = {"t": "member", **_SEAT, "m": {"t": "hello", "pid": 1}, "n": 1}
        deliver(one.peers, peer, hello)
        assert one.peers.taken(peer) == 1
        one.feed(inputs.Tick())

    assert hear(tmp_path, scenario).peers.refusals == 1
    assert len(handled) == len(ended) == 1


@pytest.mark.parametrize(("loss", "is_told"), [("nan", True), ((1.5).hex(), False)])
def test_late_loss_reaches_the_machine_if_it_is_not_finite(tmp_path, loss, is_told):
    """The epoch was closed, and its iteration kept; all that goes on from it is bad."""
    rig = Rig().run(4)
    rig.feed(killed(rig, 0))
    rig.closed(g(5))
    rig.journal()
    fed: list[inputs.Input] = []

    def scenario(one: Coordinator, _: AgentPeer) -> None:
        one.state = rig.state
        one.feed = fed.append  # type: ignore[method-assign]
        one._progressed(Event(Kind.STEP, 1, 1, 1, 5, data={"loss": loss}))

    hear(tmp_path, scenario)
    assert fed == ([inputs.NotFinite(1, 1, 1, 5, "loss", "nan")] if is_told else [])
