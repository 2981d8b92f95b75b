"""What leads to a decision in a large run is known before, so that nobody has to wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import stepping
from deadpool_megatron.cluster.coordinator.stepping import goes_far
from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.events import Kind
from tests.cluster.machine.rig import Rig, g, killed

_FAR = (act.WriteRecord, act.Announce, act.CloseEpoch)


class Watched(Machine):
    """Counts the steps that went over all roles."""

    far = near = 0

    def step(self, state: State, event: ev.Input, now: float) -> tuple[State, list[act.Action]]:
        known = goes_far(state, event, now)
        after, actions = super().step(state, event, now)
        opened = any(a.kind is Kind.EPOCH_OPENED for a in actions if isinstance(a, act.EmitEvent))
        if opened or any(isinstance(action, _FAR) for action in actions):
            assert known, f"{type(event).__name__} in {state.phase}"
        self.far, self.near = self.far + known, self.near + (not known)
        return after, actions


@pytest.fixture(autouse=True)
def every_run_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "_MANY_ROLES", 1)


def watched(**more: Any) -> tuple[Rig, Watched]:
    rig = Rig(**more)
    machine = rig.machine = Watched(rig.machine._config)
    return rig, machine


def test_a_loss_a_takeover_of_roles_and_the_next_opening_go_far() -> None:
    rig, machine = watched(nodes=6, spares=2, nproc=4)
    rig.run()
    rig.steps(1)
    rig.feed(ev.NodeLost(2, "connection closed"))
    rig.closed(g(1))
    rig.opened()
    assert rig.record.epoch == 2
    assert machine.near > 5 * machine.far, "nearly all inputs are one of many"


def test_a_drain_and_a_second_loss_go_far() -> None:
    rig, _ = watched(nodes=3, spares=2, nproc=2)
    rig.run()
    rig.steps(1)
    rig.feed(ev.DrainRequested(0))
    order = rig.one(act.Pause)
    rig.steps(order.iteration)
    rig.feed(*(ev.Paused(*rig.seat(r), 1, order.iteration) for r in rig.record.seats))
    rig.closed(g(order.iteration))
    rig.opened()
    rig.feed(killed(rig, 3))
    assert rig.of(act.CloseEpoch)


def test_a_small_run_does_nothing_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "_MANY_ROLES", 1024)
    rig = Rig(nodes=2, spares=1)
    assert not goes_far(rig.state, ev.NodeLost(1, "gone"), rig.now)
