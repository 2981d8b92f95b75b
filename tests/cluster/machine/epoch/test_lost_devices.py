"""A process that finds no device: a fault of its host for good, whenever it is found."""

from __future__ import annotations

import pytest

from deadpool_megatron.cluster.failures import EXIT_NO_DEVICE
from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.events import Kind
from tests.cluster.machine.epoch.test_kinds import CUDA, ended, kinds, recover
from tests.cluster.machine.rig import Phase, Rig, g, nodes_of

GONE = "deadpool: no GPU for this process: AssertionError: Torch not compiled with CUDA enabled"


def finds_none(rig: Rig, node: int, slot: int = 0) -> list[act.Action]:
    incarnation = rig.state.fleet.members[node, slot].incarnation
    return rig.feed(
        ev.MemberLost(node, slot, incarnation, exit_code=EXIT_NO_DEVICE, last_line=GONE)
    )


@pytest.mark.parametrize("until", [Phase.CLOSING, Phase.DECIDING, Phase.OPENING, Phase.RUNNING])
def test_the_roles_of_its_node_move_at_once(until: Phase) -> None:
    """Its predecessor has died of the device; the successor finds out while the epoch is closed, or
    the next one is decided, opened or run."""
    rig = Rig(nproc=2).run(3)
    rig.feed(ended(rig, 2, CUDA))
    if until is not Phase.CLOSING:
        rig.closed(g(3))
    if until in (Phase.OPENING, Phase.RUNNING):
        rig.journal()
    if until is Phase.RUNNING:
        rig.restored()
    assert rig.state.phase is until
    finds_none(rig, 1)
    assert not rig.of(act.StartMembers), "another one would find none either"
    if until is Phase.DECIDING:
        rig.journal()
    if rig.state.phase is Phase.CLOSING:
        rig.closed(g(3), g(3, 2))
    rig.opened()
    assert rig.state.phase is Phase.RUNNING
    assert nodes_of(rig.record) == {0: 0, 1: 0, 2: 2, 3: 2}
    assert rig.record.history.wrong == {1}
    assert kinds(rig, Kind.NODE_ASIDE) == ["device-error"]


def test_devices_lost_within_one_step_are_not_the_programs_fault() -> None:
    rig = Rig(nodes=2, spares=3).run(3)
    for node in (1, 2, 3):
        finds_none(rig, node)
        recover(rig, 3)
    assert nodes_of(rig.record) == {0: 0, 1: 4}
    assert rig.state.last_words is None
    assert not rig.record.history.failures


def test_a_spare_without_a_device_gets_no_role() -> None:
    rig = Rig(spares=2).run(3)
    finds_none(rig, 2)
    assert rig.state.phase is Phase.RUNNING
    rig.feed(ev.NodeLost(1, "gone"))
    recover(rig, 3)
    assert nodes_of(rig.record) == {0: 0, 1: 3}


def test_a_run_begins_without_a_node_that_has_no_device() -> None:
    """Both of its processes say so, before the spare has come; another one needs the spare."""
    rig = Rig(nproc=2)
    rig.join(0, 1)
    finds_none(rig, 1, 1)
    finds_none(rig, 1, 0)
    rig.join(2)
    rig.hello(0, 2)
    assert nodes_of(rig.pending) == {0: 0, 1: 0, 2: 2, 3: 2}
    rig.journal()
    finds_none(rig, 2)
    finish = rig.one(act.Finish)
    assert (finish.exit_status, finish.kind) == (2, "device-error")
    assert GONE in finish.reason
