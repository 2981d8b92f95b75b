"""The coordinator and recomputation: recipes, refused replays, whole copies afterwards."""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.part_kinds import SUMS_PART, UPDATE_PART, gradients_part
from deadpool_megatron.layout.records import BadPart, Holding, Inventory, PartInfo, RoleLayout
from deadpool_megatron.layout.replaying import REPLAY, key, step_parts
from deadpool_megatron.layout.schemes import recomputes
from tests.cluster.machine.rig import STEP as WHOLE
from tests.cluster.machine.rig import Phase, Rig, g, layout

LED = frozenset({gradients_part("main"), UPDATE_PART, SUMS_PART, "extras@step"})


def with_steps(role: int) -> RoleLayout:
    plain = layout(role, 2)
    steps = step_parts({"main": PartInfo("", 4, (role,))}, 64, role)
    return replace(plain, parts=(plain.parts[0], *steps, plain.parts[1]))


def lost_role(rig: Rig) -> None:
    """Node 1 dies; node 0 holds its own role whole, and of role 1 a base and two steps."""
    rig.feed(*(ev.MemberRegistered(*rig.seat(r), with_steps(r)) for r in range(2)))
    rig.steps(7)
    rig.feed(ev.NodeLost(1, "gone"))
    answer(rig)


def answer(rig: Rig) -> None:
    own = [Holding(0, g(it), WHOLE | LED) for it in (5, 6, 7)]
    copies = [Holding(1, g(5), WHOLE), Holding(1, g(6), LED), Holding(1, g(7), LED)]
    layouts = tuple(with_steps(role) for role in range(2))
    held = Inventory(0, rig.record.epoch, (*own, *copies), layouts)
    others = [Inventory(node, rig.record.epoch) for node in sorted(rig.awaited - {0})]
    rig.feed(*(ev.NodeInventory(one) for one in (held, *others)))


def test_a_replay_that_is_refused_is_given_up_for_whole_copies() -> None:
    rig = Rig(protection="recompute", full_every=4).run()
    lost_role(rig)
    restore = rig.pending.restore
    assert restore.generation == g(7)
    assert restore.recipes[1].replay is not None
    assert recomputes(rig.pending.protection)
    rig.journal()
    rig.feed(ev.RestoreFailed(*rig.seat(1), 2, REPLAY, "main is not what its owner had"))
    (warning,) = rig.emitted(Kind.LOG)
    assert "every iteration is copied whole" in warning.data["text"]
    rig.tick(0.6)
    assert "not what its owner had" in rig.one(act.CloseEpoch).cause
    answer(rig)
    assert rig.state.blame.bad_parts == {BadPart(0, 1, g(7), SUMS_PART)}
    assert rig.pending.restore.generation == g(6), "the next older one, recomputed as well"
    assert not recomputes(rig.pending.protection)


def test_a_step_that_cannot_be_fetched_is_not_counted_on_again() -> None:
    rig = Rig(protection="recompute", full_every=4).run()
    lost_role(rig)
    rig.journal()
    part = key(g(7), UPDATE_PART)
    rig.feed(ev.RestoreFailed(*rig.seat(1), 2, part, "checksum does not match"))
    rig.tick(0.6)
    answer(rig)
    assert rig.state.blame.bad_parts == {BadPart(0, 1, g(7), UPDATE_PART)}
    assert rig.pending.restore.generation == g(6)
    assert recomputes(rig.pending.protection), "nothing was computed wrong"


def test_a_node_that_holds_a_part_of_a_chain_matters_until_it_is_restored() -> None:
    rig = Rig(nodes=2, spares=2, protection="recompute", full_every=4).run()
    rig.feed(*(ev.MemberRegistered(*rig.seat(r), with_steps(r)) for r in range(2)))
    rig.steps(7)
    rig.feed(ev.NodeLost(1, "gone"))
    layouts = tuple(with_steps(role) for role in range(2))
    here = Inventory(0, 1, (Holding(0, g(7), WHOLE), Holding(1, g(7), LED)), layouts)
    base = Inventory(3, 1, (Holding(1, g(6), WHOLE),), layouts)
    rig.feed(*(ev.NodeInventory(one) for one in (here, Inventory(2, 1), base)))
    assert rig.pending.restore.generation == g(7)
    rig.journal()
    rig.feed(ev.NodeLost(3, "gone"))
    assert rig.state.phase is Phase.CLOSING
