"""Small runs under many hazards, and months of a large one: the rules of the design hold.

The checks are in the world: rule 2 (a commonly committed generation can be produced), rule 3 (a
promised generation is there), rule 5 (nothing stale changes anything), and that epochs rise, each
has a record, seats are live, every wait has a deadline, and nothing happens before it.
"""

import random
from dataclasses import replace

import pytest

from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.state import Phase
from tests.conftest import commit
from tests.simulated.clock import Clock
from tests.simulated.hazards import draw
from tests.simulated.late import feed_stale
from tests.simulated.months import Months
from tests.simulated.trace import hold
from tests.simulated.world import Shape, World


def still(shape: Shape) -> World:
    """A world without delays, at rest after its start."""
    world = World(shape.config(), Clock("", 0.0))
    world.settle()
    return world


@pytest.mark.parametrize(
    "group", [pytest.param(n, marks=[pytest.mark.slow] if n > 2 else []) for n in range(10)]
)
def test_small_runs_keep_the_rules_under_hazards(group):
    for number in range(group, 150, 10):
        seed = f"{commit()} {number}"
        choose = random.Random(seed)
        sizes = [choose.randint(*limits) for limits in ((2, 3), (0, 2), (1, 2), (1, 2))]
        shape = Shape(*sizes, choose.choice([0, 0, 2, 3]), choose.random() < 0.5)
        hold(seed, shape, draw(seed, 40, choose.choice([0.5, 3.0])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [Shape(64, 2), pytest.param(Shape(64, 0, is_elastic=True), marks=pytest.mark.full)],
)
def test_months_of_64_nodes_keep_the_rules(shape):
    months = Months(commit(), shape)
    months.run(300)
    print(f"300 days, {months.recoveries} recoveries, {months.ends.total()} jobs ended")
    assert months.recoveries > 60
    assert not (shape.is_elastic and months.ends), "it continues with fewer"


def test_a_run_whose_only_iteration_cannot_be_written_keeps_it_in_memory():
    """No step was reported yet, but an iteration is committed."""
    world = still(Shape(2, 1, 1, 2))
    world.train()
    world.lose(0)
    world.lose(1)
    world.restart_coordinator(landed=False)
    world.wait("rejoin")
    world.end_waits()  # for a spare, then for the dump
    assert world.finished.keeps_slots
    text = "nothing was saved; the dump of nodes [2] could not be written ("
    assert text in world.finished.reason


def test_no_plan_moves_a_role_to_a_quarantined_node():
    """Each epoch is held against it by the world; a failure may."""
    world = still(Shape())
    for node in (1, 0):
        world.feed(ev.DrainRequested(node))
        for _ in range(4):
            world.train()
    assert world.state.seats.nodes == {0, 2}
    world.lose(0)
    for _ in range(4):
        world.train()
    assert world.state.seats.nodes == {1, 2}


def test_a_successor_knows_the_size_at_which_the_run_trains():
    world = still(Shape(3, 0, is_elastic=True))
    world.train()
    world.lose(2)
    world.wait("spare_timeout")
    world.train()
    assert (world.state.phase, world.size) == (Phase.RUNNING, 2)
    world.take_over_quietly()


def test_a_successor_knows_the_sizes_that_have_failed():
    world = still(Shape(3, 0, is_elastic=True))
    world.train()
    world.refusals = 12
    world.lose(2)
    world.wait("spare_timeout")
    for _ in range(4):
        world.tick(0.6)
        world.settle()
    assert world.state.changes.failed == (2, 2, 1, 1)
    world.restart_coordinator(landed=True)
    assert world.state.changes.failed == (2, 2, 1, 1)


def test_a_report_during_the_run_takes_no_size_away():
    """As from a node whose memory has filled up since the start."""
    world = still(Shape(3, 0, is_elastic=True))
    world.train()
    world.reported_sizes = replace(world.sizes, replicas=(3,), reason="too little memory")
    for _ in range(2):
        world.lose(max(world.nodes))
        world.wait("spare_timeout")
        world.train()
        assert (world.state.phase, world.size) == (Phase.RUNNING, 2)
        world.join()
        world.wait("settle")
        world.wait("settle")
        world.train()
        assert (world.state.phase, world.size) == (Phase.RUNNING, 3)


def test_a_report_after_a_restart_takes_no_size_away():
    world = still(Shape(3, 0, is_elastic=True))
    world.train()
    world.lose(2)
    world.wait("spare_timeout")
    world.train()
    # As when all processes have been started again, at the smaller size.
    state = world.state
    state.start, state.record = world.epoch, replace(state.record, begins=True)
    world.reported_sizes = replace(world.sizes, replicas=(3,), reason="too little memory")
    role = min(state.seats)
    member = world.member_of(role)
    world.feed(
        ev.MemberRegistered(*member.seat.to_list(), world.layout(role), world.reported_sizes)
    )
    assert state.memory.sizes == world.sizes


@pytest.mark.parametrize("lost", [None, 0, 2])
def test_run_without_spares_exports_its_dump(lost):
    """One more node may be lost while the checkpoint is made; the end comes with its end."""
    world = still(Shape(nodes=3, spares=0, nproc=2))
    world.train()
    world.lose(1)
    world.wait("spare_timeout")
    assert world.exporting == world.common
    if lost is not None:
        world.lose(lost)
        world.settle()
        assert world.finished is None
    feed_stale(world)
    world.end_export("/exports/iter_0000003" if lost is None else "")
    assert world.finished.exit_status == 75
    assert ("--load" in world.finished.reason) is (lost is None)
