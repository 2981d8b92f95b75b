"""Changes of the protection in a running job, in the coordinator's state machine."""

from dataclasses import replace

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.layout.memory_needs import refusal
from deadpool_megatron.layout.schemes import ProtectionPlan, plan_of_kind
from deadpool_megatron.settings import Settings
from tests.cluster.machine.rig import Phase, Rig, g

EVERY_THIRD = replace(ProtectionPlan(), every=3)


def asked(plan: ProtectionPlan, **settings: object) -> Rig:
    """Nodes 0 and 1 train, 2 is a spare; another plan is asked for after iteration 7."""
    rig = Rig(nodes=2, spares=1, **settings).run(7)
    rig.feed(ev.ProtectionRequested(plan, "a test"))
    return rig


def changed(rig: Rig, iteration: int) -> None:
    """The pause at ``iteration`` leads to the next epoch, which opens."""
    rig.feed(*(ev.Paused(*rig.seat(role), rig.record.epoch, iteration) for role in (0, 1)))
    rig.reopened(g(iteration, rig.record.epoch))
    assert rig.state.phase is Phase.RUNNING


def test_pauses_are_after_protected_iterations_only():
    rig = asked(EVERY_THIRD)
    changed(rig, 9)
    rig.steps(10)
    rig.feed(ev.DrainRequested(1))
    assert rig.only(act.Pause) == act.Pause(2, 12)
    rig.feed(ev.PauseRefused(*rig.seat(1), 2, 12))
    assert rig.only(act.Pause) == act.Pause(2, 15)
    rig.tick(rig.settings.hang_seconds * 2)
    assert rig.state.phase is Phase.PAUSING, "it takes as many iterations as the cadence says"
    rig.tick(rig.settings.hang_seconds)
    assert rig.state.phase is Phase.CLOSING


@pytest.mark.parametrize(
    ("plan", "settings", "nodes", "reason"),
    [
        (EVERY_THIRD, Settings(), 2, ""),
        (EVERY_THIRD, Settings(), 1, "needs at least 2 nodes, there are 1: 1 more"),
        (EVERY_THIRD, Settings(copies=2), 2, "survives 2 lost nodes needs at least 3 nodes"),
        (replace(EVERY_THIRD, every=0), Settings(), 2, "between 1 and 1000"),
        (plan_of_kind("parity", 1, 4), Settings(), 3, ""),
        (plan_of_kind("parity", 1, 4), Settings(), 2, "needs at least 3 nodes"),
        (plan_of_kind("parity", 1, 1), Settings(), 9, "at least 2 roles"),
        (plan_of_kind("local", 1, 0), Settings(), 1, ""),
        (plan_of_kind("parity", 1, 255), Settings(), 300, ""),
        (
            plan_of_kind("parity", 1, 256),
            Settings(),
            300,
            "at most 255 roles next to 1 block, not 256: choose a smaller --group",
        ),
    ],
)
def test_impossible_plan_is_refused(plan, settings, nodes, reason):
    found = refusal(plan, nodes, settings)
    assert reason in found
    assert bool(found) == bool(reason)
