"""What takes long is handled in a thread: the loop goes on, inputs stay in order, and a report that
cannot be handled is refused there as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from deadpool_megatron.cluster.coordinator import stepping
from deadpool_megatron.cluster.coordinator.stepping import Stepper
from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import Action
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state.state import State
from tests.cluster.machine.rig import Rig

_LONG_SECONDS = 0.3


class SlowMachine:
    """Handles a lost node for long; raises at node 13."""

    def __init__(self) -> None:
        self.handled: list[inputs.Input] = []

    def step(self, state: State, event: inputs.Input, now: float) -> tuple[State, list[Action]]:
        del now
        if isinstance(event, inputs.NodeLost):
            time.sleep(_LONG_SECONDS)
            if event.node == 13:
                raise ValueError("no such node")
        self.handled.append(event)
        return state, []


class Heard:
    """In place of Peers."""

    def __init__(self) -> None:
        self.hearing = ""
        self.refused: list[str] = []

    def refuse_broken(self, who: str, what: str, error: BaseException) -> None:
        self.refused.append(f"{who}: {what}: {error}")


class Rigged:
    """A stepper, and what it does."""

    def __init__(self) -> None:
        self.machine, self.peers = SlowMachine(), Heard()
        self._tasks: list[asyncio.Task[None]] = []
        self.stepper = Stepper(
            cast(Machine, self.machine),
            Rig().state,
            cast(Peers, self.peers),
            took=lambda before, actions: None,
            spawn=self._spawn,
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))

    async def wait(self) -> None:
        while self._tasks:
            await self._tasks.pop(0)


@pytest.fixture(autouse=True)
def only_losses_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stepping, "goes_far", lambda state, event, now: isinstance(event, inputs.NodeLost)
    )


async def test_the_loop_goes_on_and_inputs_stay_in_order() -> None:
    rig = Rigged()
    fed: list[inputs.Input] = [
        inputs.StepReported(1, 1),
        inputs.NodeLost(2, "gone"),
        inputs.StepReported(1, 2),
        inputs.NodeLost(3, "gone"),
        inputs.StepReported(1, 3),
    ]
    began = time.monotonic()
    for one in fed:
        rig.stepper.feed(one)
    assert time.monotonic() - began < _LONG_SECONDS, "nobody waits for what takes long"
    assert rig.machine.handled == fed[:1]
    await rig.wait()
    assert rig.machine.handled == fed


async def test_a_report_that_cannot_be_handled_is_refused_by_who_has_sent_it() -> None:
    rig = Rigged()
    rig.peers.hearing = "agent of node 5"
    rig.stepper.feed(inputs.NodeLost(13, "gone"))
    rig.peers.hearing = ""
    rig.stepper.feed(inputs.StepReported(1, 1))
    await rig.wait()
    assert rig.peers.refused == ["agent of node 5: NodeLost: no such node"]
    assert rig.machine.handled == [inputs.StepReported(1, 1)]


async def test_others_have_their_turn_between_inputs_that_have_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a takeover at full size a hundred thousand reports wait for one step."""
    monkeypatch.setattr(stepping, "_TURN_SECONDS", 0.0)
    rig, seen = Rigged(), list[int]()

    async def others() -> None:
        while len(rig.machine.handled) < 101:
            await asyncio.sleep(0)
            seen.append(len(rig.machine.handled))

    rig.stepper.feed(inputs.NodeLost(2, "gone"))
    for iteration in range(100):
        rig.stepper.feed(inputs.StepReported(1, iteration))
    await others()
    await rig.wait()
    assert rig.machine.handled[1:] == [inputs.StepReported(1, n) for n in range(100)]
    assert len(set(seen)) > 50


async def test_after_the_end_nothing_comes_of_it() -> None:
    rig = Rigged()
    rig.stepper.feed(inputs.NodeLost(2, "gone"))
    rig.stepper.feed(inputs.StepReported(1, 1))
    rig.stepper.end()
    rig.stepper.feed(inputs.StepReported(1, 2))
    await rig.wait()
    assert rig.machine.handled == [inputs.NodeLost(2, "gone")], "what waited is left out too"
    assert rig.peers.refused == []
