"""What the loss of a node means under other schemes than copies at buddies."""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.epoch.closing import matters
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.cluster.machine.state.phases import Opening
from deadpool_megatron.layout.places.parity import parity_groups
from deadpool_megatron.layout.records import Decoding, Recipe, Replay, Source
from deadpool_megatron.layout.schemes import Kind
from tests.cluster.machine.rig import Phase, Rig, g, killed, nodes_of


def test_local_goes_on_from_memory_after_a_crash_and_needs_no_spare() -> None:
    rig = Rig(nodes=2, spares=1, protection="local").run()
    assert (rig.record.replicas, rig.record.protection.kind) == (0, Kind.LOCAL)
    assert not rig.record.fewer_copies
    rig.feed(ev.NodeLost(2, "gone"))
    assert rig.state.phase is Phase.RUNNING
    rig.feed(killed(rig, 0))
    rig.tick(1.0)
    rig.closed(g(7))
    assert (rig.pending.restore.kind, rig.pending.restore.generation) == ("memory", g(7))
    assert nodes_of(rig.pending) == {0: 0, 1: 1}


def test_local_falls_to_the_checkpoint_when_a_node_is_lost() -> None:
    rig = Rig(nodes=2, spares=1, protection="local").run()
    rig.feed(ev.DurableValid(5, "/ck/5"))
    rig.lose(1, g(7))
    assert (rig.pending.restore.kind, rig.pending.restore.path) == ("durable", "/ck/5")


def test_local_without_a_checkpoint_says_what_it_cannot_survive() -> None:
    rig = Rig(nodes=2, spares=1, protection="local").run()
    rig.lose(1, g(7))
    order = rig.one(act.Dump)
    rig.feed(*(ev.Dumped(node, order.generation) for node in order.nodes))
    end = rig.one(act.Finish)
    assert end.exit_status == 1
    assert end.reason.startswith("--deadpool-protection local keeps the state of a node")
    assert "no generation can be restored" in end.reason
    assert "\n" not in end.reason


def test_the_loss_of_a_holder_makes_a_new_epoch_that_of_another_spare_does_not() -> None:
    settings = {"protection": "parity", "parity_group": 2}
    rig = Rig(nodes=2, spares=2, **settings).run()
    (group,) = parity_groups(rig.record)
    (holder,) = group.holders
    other = 5 - holder
    assert {holder, other} == {2, 3}
    rig.feed(ev.NodeLost(other, "gone"))
    assert rig.state.phase is Phase.RUNNING
    rig.feed(ev.NodeLost(holder, "gone"))
    assert rig.one(act.CloseEpoch)
    rig.closed(g(7))
    assert rig.pending.restore.generation == g(7)
    # Two nodes are left: each role is a group of its own, with a block at the other node.
    assert {group.roles for group in parity_groups(rig.pending)} == {(0,), (1,)}
    assert not rig.pending.fewer_copies


def test_places_that_a_recipe_reads_from_matter_until_all_is_restored() -> None:
    rig = Rig(nodes=2, spares=3, protection="parity", parity_group=2).run()
    (holder,) = (h for group in parity_groups(rig.record) for h in group.holders)
    first, second = sorted({2, 3, 4} - {holder})
    recipes = {
        0: Recipe(decodings={"main": Decoding((0, 1), 1, {2: (Source(first, 1 << 40),)})}),
        1: Recipe(replay=Replay(g(0), (g(1),), {g(1): {"main": (Source(second, 1),)}})),
    }
    record = replace(rig.record, restore=replace(rig.record.restore, recipes=recipes))
    assert not matters(rig.state, record, first)
    opening = rig.state._replace(doing=Opening(0.0, PersistentSet(set(rig.state.seats) - {0})))
    assert matters(opening, record, first)
    assert matters(opening, record, second)
