"""Inputs are handled in order, and others have their turn between those that have waited."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from deadpool_megatron.cluster.coordinator import service as stepping
from deadpool_megatron.cluster.coordinator.service import Stepper
from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import Action
from deadpool_megatron.cluster.machine.machine import Machine

INPUTS = [inputs.StepReported(1, n) for n in range(101)]


class Rigged:
    """A stepper, and what it does; the first input leads to the others."""

    hearing = ""  # as of Peers

    def __init__(self) -> None:
        self.handled: list[inputs.Input] = []
        self._tasks: list[asyncio.Task[None]] = []
        parts: Any = (self, self, self._took, self._spawn)
        self.stepper = Stepper(cast(Machine, parts[0]), cast(Peers, parts[1]), *parts[2:])

    def handle(self, event: inputs.Input, now: float) -> list[Action]:
        del now
        self.handled.append(event)
        return []

    def _took(self, actions: list[Action]) -> None:
        if len(self.handled) == 1:
            for one in INPUTS[1:]:
                self.stepper.feed(one)
            assert len(self.handled) == 1, "it is never entered twice"

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))

    async def wait(self) -> None:
        while self._tasks:
            await self._tasks.pop(0)


async def test_others_have_their_turn_between_inputs_that_have_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a takeover at full size a hundred thousand reports wait."""
    monkeypatch.setattr(stepping, "_TURN_SECONDS", 0.0)
    rig, seen = Rigged(), set[int]()
    rig.stepper.feed(INPUTS[0])
    while len(rig.handled) < len(INPUTS):
        await asyncio.sleep(0)
        seen.add(len(rig.handled))
    await rig.wait()
    assert rig.handled == INPUTS
    assert len(seen) > 50


async def test_after_the_end_nothing_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "_TURN_SECONDS", 0.0)
    rig = Rigged()
    rig.stepper.feed(INPUTS[0])
    rig.stepper.end()
    rig.stepper.feed(inputs.Tick())
    await rig.wait()
    assert rig.handled == INPUTS[:1], "what waited is left out too"
