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


def run(directory: Path, scenario: Callable[[Coordinator, AgentPeer], None]) -> Coordinator:
    """Let a coordinator with node 0 carry out a scenario, until nothing is left to do."""

    async def live() -> Coordinator:
        journal = Journal(directory / "journal")
        service = coordinator(lambda name: journal, directory, "run")
        writer: Any = PipeWriter(1)
        peer = service.peers.agents[0] = AgentPeer(0, "boot", writer, 0.0)
        scenario(service, peer)
        for _ in range(20):
            await asyncio.sleep(0.005)
        return service

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
    def scenario(service: Coordinator, peer: AgentPeer) -> None:
        deliver(service.peers, peer, {**message, "n": 1})

    service = run(tmp_path, scenario)
    assert service.peers.refusals == 1
    assert service.peers.taken(service.peers.agents[0]) == 1, "its successor would get it again"
    assert not service.tasks


def test_report_that_the_machine_fails_at_is_refused_and_ends_this_coordinator(
    tmp_path, monkeypatch
):
    """Its state may be half changed; the successor reads the journal, without the report."""
    ended, handled = list[BaseException](), list[inputs.Input]()
    monkeypatch.setattr(stepping, "_REFUSAL_SECONDS", 0.02)
    monkeypatch.setattr(stepping, "end_process", ended.append)

    def scenario(service: Coordinator, peer: AgentPeer) -> None:
        def fails(item: inputs.Input, _: float) -> Any:
            handled.append(item)
            raise KeyError("a mistake of ours")

        monkeypatch.setattr(service._stepper._machine, "handle", fails)
        hello = {"t": "member", **_SEAT, "m": {"t": "hello", "pid": 1}, "n": 1}
        deliver(service.peers, peer, hello)
        assert service.peers.taken(peer) == 1
        service.feed(inputs.Tick())

    assert run(tmp_path, scenario).peers.refusals == 1
    assert len(handled) == len(ended) == 1


@pytest.mark.parametrize(("loss", "is_fed"), [("nan", True), ((1.5).hex(), False)])
def test_late_loss_reaches_the_machine_if_it_is_not_finite(tmp_path, loss, is_fed):
    """The epoch was closed, and its iteration kept: all later iterations are bad."""
    rig = Rig().run(4)
    rig.feed(killed(rig, 0))
    rig.closed(g(5))
    rig.journal()
    fed: list[inputs.Input] = []

    def scenario(service: Coordinator, _: AgentPeer) -> None:
        service.state = rig.state
        service.feed = fed.append  # type: ignore[method-assign]
        service._progressed(Event(Kind.STEP, 1, 1, 1, 5, data={"loss": loss}))

    run(tmp_path, scenario)
    assert fed == ([inputs.NotFinite(1, 1, 1, 5, "loss", "nan")] if is_fed else [])
