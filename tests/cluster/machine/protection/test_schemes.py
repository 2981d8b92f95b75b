"""Roles under other schemes than copies: which losses matter, and what recipes are refused."""

from dataclasses import replace

import pytest

from deadpool_megatron.cluster.coordinator.orders import RecordFrames
from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.membership import block_holders, matters
from deadpool_megatron.cluster.machine.state import Opening
from deadpool_megatron.layout import records
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.parity_groups import ParityPlacement
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import BadPart, Generation, Holding, Inventory
from deadpool_megatron.wire.framing import FrameBuffer
from tests.cluster.machine.rig import STEP, Phase, Rig, g, layout

EXTRAS = frozenset({"extras@step"})
CODED = frozenset({"main", "members"})


def test_sources_of_a_recipe_matter_until_all_roles_are_restored():
    rig = Rig(nodes=2, spares=3, protection="parity", parity_group=2).run()
    (holder,) = block_holders(rig.record)
    first, second = sorted({2, 3, 4} - {holder})
    decodings = [
        records.Decoding((0, 1), 1, {2: (records.Source(node, 1 << 40),)})
        for node in (first, second)
    ]
    recipes = {role: records.Recipe({"main": each}) for role, each in enumerate(decodings)}
    record = replace(rig.record, restore=replace(rig.record.restore, recipes=recipes))
    assert not matters(rig.state, record, first)
    rig.state.phase_state = Opening(0.0, set(rig.state.seats) - {0})
    assert matters(rig.state, record, first)
    assert matters(rig.state, record, second)


def begin(spares: int = 3, **settings: object) -> Rig:
    """Three roles in one group; nodes without a role hold the parity."""
    return Rig(nodes=3, spares=spares, protection="parity", parity_group=3, **settings).run(7)


class World:
    """The memory of the nodes in epoch 1, by whose record the parity is placed."""

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
        holdings = [Holding(r, g, parts) for r, parts in roles.items() for g in self.generations]
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


def test_only_the_node_of_a_lost_role_receives_its_recipe():
    rig = begin()
    lose_role_1(rig, g(7))
    record = rig.record
    frames = RecordFrames(record)
    for role, seat in record.seats.items():
        own, common = FrameBuffer().feed(frames.to(seat.node))
        restore = records.Restore.from_dict(own["restore"])
        assert restore == record.restore.of_roles([role])
        assert set(restore.recipes) == ({1} if role == 1 else set())
        found = records.EpochRecord.from_dict(common["record"])
        wanted = replace(record, restore=record.restore.of_roles(()), history=History())
        assert found == wanted


@pytest.mark.parametrize("spares", [3, 4])
def test_loss_of_a_parity_holder_ends_the_epoch(spares):
    """Its blocks have to be computed somewhere else; a node that owes nothing may leave."""
    rig = begin(spares=spares)
    (group,) = ParityPlacement.of_record(rig.record).groups
    copies = CopyPlacement.of_record(rig.record)
    owed = {node for role in range(3) for node in copies.buddies(role, (0, 1, 2))}
    (idle, *_) = set(rig.record.nodes) - {0, 1, 2} - {*group.holders} - owed
    rig.feed(ev.NodeLost(idle, "gone"))
    assert not rig.of(act.CloseEpoch)
    rig.feed(ev.NodeLost(group.holders[0], "gone"))
    assert rig.only(act.CloseEpoch).epoch == 1


def test_undecodable_part_is_not_relied_on_again():
    """Only the parity is given up: the other roles still restore from their own slots."""
    rig = begin()
    world = lose_role_1(rig, g(6), g(7))
    (holder,), (block,) = world.group.holders, world.group.blocks
    rig.feed(ev.NotRestored(*rig.seat(1), 2, "main", "too few blocks are intact"))
    rig.tick(0.6)
    assert "too few blocks" in rig.only(act.CloseEpoch).cause
    assert rig.state.blame.bad_parts == {BadPart(holder, block, g(7), "main")}
    world.closed()
    restore = rig.pending.restore
    assert restore.generation == g(6)
    assert set(restore.recipes) == {1}
