"""A coordinator dies in each phase and another takes over from the journal and from the agents."""

import copy
from collections.abc import Collection

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.machine import NO_NODES
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Holding, Inventory
from tests.cluster.machine.rig import STEP, Phase, Rig, g, killed, layout, nodes_of


def rejoin(
    rig: Rig,
    old: Rig,
    *nodes: int,
    closed: int = 0,
    restored: bool = True,
    ended: Collection[int] = (),
    epoch: int | None = None,
) -> None:
    """Agents of the run of ``old`` come back. ``ended``: roles whose processes died meanwhile."""
    newest = old.record.epoch if epoch is None else epoch
    dead = {(old.record.seats[role].node, old.record.seats[role].local_rank) for role in ended}
    for node in nodes:
        there = {p[1]: m.incarnation for p, m in old.state.fleet.members.items() if p[0] == node}
        alive = {slot: number for slot, number in there.items() if (node, slot) not in dead}
        done = dict.fromkeys(alive, newest) if restored else {}
        event = ev.NodeJoined(
            node, "host", 1000 + node, f"node{node}", alive, there, newest, closed, done
        )
        rig.feed(event)


def repeat(rig: Rig) -> None:
    """Repeat the reports that agents send after a welcome in an epoch that runs."""
    rig.restored()
    spares = {node for node, address in rig.record.nodes.items() if address.spare}
    rig.warm(*spares)


def assert_untouched(rig: Rig) -> None:
    assert rig.state.phase is Phase.RUNNING
    assert rig.state.epoch == 1
    assert not rig.of(act.CloseEpoch, rig.log)
    assert not rig.of(act.StartMembers, rig.log)
    assert not rig.of(act.WriteRecord, rig.log)


def test_run_ends_well_when_its_end_was_reported_to_the_dead_coordinator():
    old = Rig(spares=0).run()
    rig = old.successor()
    rejoin(rig, old, 0)
    rig.feed(ev.MemberDone(*old.seat(0), 1))
    rejoin(rig, old, 1)
    assert rig.state.phase is Phase.RUNNING
    rig.feed(ev.MemberDone(*old.seat(1), 1))
    assert rig.only(act.Finish).exit_status == 0


def test_replacement_that_was_started_already_does_not_have_the_role():
    old = Rig(spares=0).run()
    rig = old.successor()
    rejoin(rig, old, 0)
    rig.feed(ev.NodeJoined(1, "host", 1, "node1", {0: 1}, {0: 1}, 1))
    assert not rig.of(act.StartMembers, rig.log)
    assert "roles [1] ended" in rig.only(act.CloseEpoch).cause


@pytest.mark.parametrize("node", [1, 2])
def test_node_that_does_not_come_back_is_lost(node):
    old = Rig(nodes=2, spares=1).run()
    rig = old.successor()
    rejoin(rig, old, *({0, 1, 2} - {node}))
    repeat(rig)
    assert rig.state.phase is Phase.BOOTSTRAPPING
    rig.tick(rig.settings.rejoin_seconds)
    assert rig.emitted(Kind.NODE_LOST)[0].node == node
    if node == 1:
        assert "node 1: did not reconnect" in rig.only(act.CloseEpoch).cause
        rig.closed(g(7))
        assert nodes_of(rig.pending) == {0: 0, 1: 2}
    else:
        assert_untouched(rig)  # a spare that owes no copy
    rejoin(rig, old, node)
    assert rig.only(act.DropNode).node == node


@pytest.mark.parametrize("restarted", [True, False])
def test_node_whose_agent_is_proved_to_have_ended_is_not_awaited(*, restarted):
    """After a restart it may be about to come back. Of others the proof means nothing."""
    old = Rig(nodes=2, spares=1).run()
    rig = old.successor(restarted=restarted)
    rejoin(rig, old, 0, 2)
    for node in (0, 2, 9):
        rig.feed(ev.AgentEnded(node))
    assert not rig.state.fleet.removed
    rig.feed(ev.AgentEnded(1))
    if restarted:
        assert not rig.state.fleet.removed
    else:
        assert "node 1: its agent has ended" in rig.only(act.CloseEpoch).cause
        rig.closed(g(7))
        assert nodes_of(rig.pending) == {0: 0, 1: 2}
    old.feed(ev.AgentEnded(1))
    assert old.state.fleet.nodes.keys() == {0, 1, 2}


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("taken_for", ["restart", "takeover"])
def test_takeover_like_a_restart_gives_up_no_node_before_its_deadline(taken_for, *, comes):
    """The standby's own agent never met the coordinator before, or an agent was started again."""
    old = Rig(nodes=2, spares=1).run()
    old.join(3)
    rig = old.successor(restarted=taken_for == "restart")
    rejoin(rig, old, 3, epoch=0, restored=False)
    if taken_for == "restart":
        rejoin(rig, old, 2)
    else:
        rig.feed(ev.NodeJoined(2, "host", 1002, "node2"))
        assert rig.state.restarted
    rejoin(rig, old, 0)
    rig.tick(rig.settings.rejoin_seconds - 0.1)
    assert rig.state.phase is Phase.BOOTSTRAPPING
    assert not rig.state.fleet.removed
    if comes:
        rejoin(rig, old, 1)
        assert rig.state.phase is Phase.RUNNING
        assert not rig.of(act.CloseEpoch, rig.log)
    else:
        rig.tick(0.1)
        assert rig.state.fleet.removed.keys() == {1}
        assert rig.only(act.CloseEpoch).epoch == 1


@pytest.mark.parametrize("lost", ["member", "node", "suspected", "fault", "inventory"])
def test_failure_before_all_are_back_is_remembered(lost):
    old = Rig(nodes=2, spares=1).run()
    rig = old.successor()
    rejoin(rig, old, 0, 1)
    found = {
        "member": killed(old, 1),
        "node": ev.NodeLost(1, "connection closed"),
        "suspected": ev.MemberSuspected(*old.seat(1), cause="frozen"),
        "fault": ev.MemberFault(*old.seat(1), epoch=1, text="peer closed"),
        "inventory": old.inventory(1, g(7)),
    }
    rig.feed(found[lost])
    rig.tick(0.6)
    assert rig.state.phase is Phase.BOOTSTRAPPING
    assert not rig.of(act.CloseEpoch)
    rejoin(rig, old, 2)
    closed = rig.only(act.CloseEpoch)
    texts = {
        "member": "SIGKILL",
        "node": "connection closed",
        "suspected": "frozen",
        "fault": "peer closed",
        "inventory": "node 1 has closed",
    }
    assert texts[lost] in closed.cause


def test_epoch_closed_by_an_agent_is_not_open():
    old = Rig(nodes=2, spares=0).run()
    rig = old.successor()
    rejoin(rig, old, 0, 1, closed=1)
    assert rig.only(act.CloseEpoch).epoch == 1


@pytest.mark.parametrize("before_all_are_back", [False, True])
def test_takeover_continues_a_pause(before_all_are_back):
    """Members that the dead coordinator has paused continue after a close."""
    old = Rig(nodes=2, spares=1).run(7)
    old.feed(ev.DrainRequested(1))
    assert old.state.phase is Phase.PAUSING
    rig = old.successor()
    rejoin(rig, old, 0, 1)
    paused = ev.Paused(*old.seat(0), 1, 9)
    if before_all_are_back:
        rig.feed(paused)
        assert rig.state.phase is Phase.BOOTSTRAPPING
    rejoin(rig, old, 2)
    if not before_all_are_back:
        assert rig.state.phase is Phase.RUNNING
        rig.feed(paused)
    assert rig.only(act.Pause) == act.Pause(1, 9)
    assert rig.state.phase is Phase.PAUSING
    rig.feed(ev.PauseRefused(*old.seat(1), 1, 9))
    assert rig.only(act.Pause) == act.Pause(1, 11)
    rig.feed(ev.Paused(*old.seat(0), 1, 11), ev.Paused(*old.seat(1), 1, 11))
    assert "pause that was ordered" in rig.only(act.CloseEpoch).cause


def test_loss_of_a_spare_before_its_copies_are_known_is_a_failure():
    old = Rig(nodes=2, spares=1).run()
    rig = old.successor()
    rejoin(rig, old, 0, 1, 2)
    assert rig.state.phase is Phase.RUNNING
    before = copy.deepcopy(rig)
    rig.feed(ev.NodeLost(2, "gone"))
    assert rig.only(act.CloseEpoch)
    repeat(before)
    before.feed(ev.NodeLost(2, "gone"))
    assert not before.of(act.CloseEpoch)


@pytest.mark.parametrize("has_layouts", [True, False])
def test_spare_lost_before_a_takeover_counts_by_the_copies_it_owed(*, has_layouts):
    """It ended no epoch then; a coordinator that comes later finds so as well."""
    old = Rig(nodes=2, spares=1).run()
    old.feed(ev.NodeLost(2, "gone"))
    assert not old.of(act.CloseEpoch)
    rig = old.successor(removed={2: "gone"})
    rejoin(rig, old, 0, 1)
    assert rig.state.phase is Phase.BOOTSTRAPPING
    if has_layouts:
        repeat(rig)
        assert_untouched(rig)
    else:
        rig.tick(rig.settings.rejoin_seconds)
        assert "node 2: gone" in rig.only(act.CloseEpoch).cause


def test_failure_counts_at_once_while_the_copies_of_a_lost_spare_are_unknown():
    old = Rig(nodes=2, spares=1).run()
    rig = old.successor()
    rejoin(rig, old, 0, 1)
    rig.feed(ev.AgentEnded(2))
    assert rig.state.phase is Phase.BOOTSTRAPPING
    rig.feed(killed(old, 1))
    assert rig.only(act.CloseEpoch)


def test_stale_report_of_an_earlier_epoch_does_not_count_as_restored():
    old = Rig(spares=0).run()
    old.kill(1, g(7))
    old.journal()
    rig = old.successor()
    rejoin(rig, old, 0, 1, closed=1, epoch=1)
    assert rig.state.waiting_for() == "restored from roles [0, 1]"
    rig.feed(ev.Restored(*rig.seat(0), 1, g(0)))
    assert rig.state.waiting_for() == "restored from roles [0, 1]"
    world = rig.config.world_size
    rig.feed(ev.MemberRegistered(*rig.seat(0), layout(0, world)))
    assert set(rig.state.memory.layouts) == {0}


@pytest.mark.parametrize("removed", [NO_NODES, {1: "connection closed"}])
def test_takeover_waits_for_a_node_with_the_only_copy(removed):
    """Its agent ended with the coordinator, or before, but its memory outlives it."""
    old = Rig(nodes=2, spares=0, protection="local").run()
    rig = old.successor(removed=removed)
    there, facts = {0: 0}, ("host", 1000, "node0")
    rig.feed(ev.NodeJoined(0, *facts, there, there, 1, 0, {0: 1}, returns=True))
    rig.steps(7)
    rig.tick(rig.settings.rejoin_seconds)
    rig.closed(g(7))
    assert rig.state.phase is Phase.WAITING_SPARE
    assert "nodes [1] with their slots" in rig.state.waiting_for()
    held = Inventory(2, 0, (Holding(1, g(7), STEP),), (layout(1, 2),))
    rig.feed(ev.NodeJoined(2, "host", 1002, "node2", found=held, returns=True))
    assert rig.pending.restore.generation == g(7)
    assert nodes_of(rig.pending) == {0: 0, 1: 2}
