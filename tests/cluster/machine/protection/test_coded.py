"""Roles that are restored from parity: where its blocks lie matters until they have their state."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deadpool_megatron.cluster.link.record_delta import RecordTeller, apply, unpack
from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.places.copies import CopyPlacement
from deadpool_megatron.layout.places.parity import ParityPlacement
from deadpool_megatron.layout.records import BadPart, Generation, Holding, Inventory, Source
from tests.cluster.link.test_record_delta import for_node
from tests.cluster.machine.rig import STEP, Phase, Rig, g, layout

EXTRAS = frozenset({"extras@step"})
CODED = frozenset({"main", "members"})


def begin(spares: int = 3, **settings: object) -> Rig:
    """Three roles in one group; nodes without a role hold the parity."""
    return Rig(nodes=3, spares=spares, protection="parity", parity_group=3, **settings).run(7)


class World:
    """What the nodes hold of epoch 1, whose record the parity was placed by."""

    def __init__(self, rig: Rig, *generations: Generation) -> None:
        self.rig = rig
        self.generations = generations
        self.layouts = {role: layout(role, 3) for role in range(3)}
        self.placement = ParityPlacement.of_record(rig.record)
        (self.group,) = self.placement.groups

    def inventory(self, node: int) -> ev.NodeInventory:
        """Own slots, the extras of all roles, and the parity blocks that the node owes."""
        roles = {role: STEP if role == node else EXTRAS for role in self.layouts}
        found = dict(self.layouts)
        for block, holder in zip(self.group.blocks, self.group.holders, strict=True):
            if holder == node:
                roles[block] = CODED
                found[block] = self.placement.layout(block, self.layouts)
        holdings = [
            Holding(r, one, parts) for r, parts in roles.items() for one in self.generations
        ]
        epoch = self.rig.record.epoch
        return ev.NodeInventory(Inventory(node, epoch, tuple(holdings), tuple(found.values())))

    def closed(self) -> None:
        """All awaited nodes answer the close."""
        self.rig.feed(*(self.inventory(node) for node in sorted(self.rig.awaited)))


def lose_role_1(rig: Rig, *generations: Generation) -> World:
    """The node of role 1 goes, and the decision is journalled."""
    world = World(rig, *generations)
    rig.feed(ev.NodeLost(1, "gone"))
    world.closed()
    assert rig.pending.restore.generation == max(generations)
    rig.journal()
    assert rig.state.phase is Phase.OPENING
    return world


def test_the_record_says_what_a_lost_role_is_computed_from() -> None:
    rig = begin()
    world = lose_role_1(rig, g(7))
    (holder,), (block,) = world.group.holders, world.group.blocks
    restore = rig.record.restore
    assert restore.sources[1]["main"] == ()
    found = restore.recipes[1].decodings["main"]
    assert found.group == (0, 1, 2)
    wanted = {0: (Source(0, 0),), 2: (Source(2, 2),), 3: (Source(holder, block),)}
    assert found.blocks == wanted


def test_only_the_node_of_a_lost_role_is_told_what_it_is_computed_from() -> None:
    rig = begin()
    lose_role_1(rig, g(7))
    record = rig.record
    teller = RecordTeller(record, None)
    for role, seat in record.seats.items():
        told = json.loads(json.dumps(teller.parts(seat.node, 0)))
        found = apply(None, unpack(told["change"]), told["sources"])
        assert found == replace(for_node(record, seat.node), history=History())
        assert set(found.restore.recipes) == ({1} if role == 1 else set())


def test_the_loss_of_a_block_matters_until_the_role_is_restored() -> None:
    """Of two blocks one is lost in time for a decision that does without it."""
    rig = begin(replicas=2)
    world = lose_role_1(rig, g(7))
    assert rig.record.seats[1].node == world.group.holders[0]
    rig.feed(ev.NodeLost(world.group.holders[1], "gone too"))
    assert rig.one(act.CloseEpoch).epoch == 2
    world.closed()
    found = rig.pending.restore.recipes[1].decodings["main"]
    assert sorted(found.blocks) == [0, 2, 3]


@pytest.mark.parametrize("spares", [3, 4])
def test_the_loss_of_a_node_that_owes_parity_ends_the_epoch(spares: int) -> None:
    """Its blocks have to be computed somewhere else; a node that owes nobody anything may go."""
    rig = begin(spares=spares)
    (group,) = ParityPlacement.of_record(rig.record).groups
    copies = CopyPlacement.of_record(rig.record)
    owed = {node for role in range(3) for node in copies.buddies(role, (0, 1, 2))}
    (idle, *_) = set(rig.record.nodes) - {0, 1, 2} - {*group.holders} - owed
    rig.feed(ev.NodeLost(idle, "gone"))
    assert not rig.of(act.CloseEpoch)
    rig.feed(ev.NodeLost(group.holders[0], "gone"))
    assert rig.one(act.CloseEpoch).epoch == 1


def test_a_part_that_cannot_be_decoded_is_not_counted_on_again() -> None:
    """Only the parity is given up: the other roles still restore from their own slots."""
    rig = begin()
    world = lose_role_1(rig, g(6), g(7))
    (holder,), (block,) = world.group.holders, world.group.blocks
    rig.feed(ev.RestoreFailed(*rig.seat(1), 2, "main", "too few blocks are intact"))
    rig.tick(0.6)
    assert "too few blocks" in rig.one(act.CloseEpoch).cause
    assert rig.state.blame.bad_parts == {BadPart(holder, block, g(7), "main")}
    world.closed()
    restore = rig.pending.restore
    assert restore.generation == g(6)
    assert set(restore.recipes) == {1}
