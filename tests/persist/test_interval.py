"""Exports of an interval that is far longer than what one of them takes: when they are ordered, and
what becomes of one that something comes in between."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from deadpool_megatron.cluster.coordinator import checkpoints
from deadpool_megatron.cluster.machine.state import Phase
from tests.persist.harness.world import DROP, TAKE, World, no_room, overwritten


def ordered(world: World) -> int | None:
    """The iteration of the export under way."""
    return world.exports.status()["now"].get("iteration")


def train(world: World, last: int, by: int = 1) -> None:
    """Iterations go by up to ``last``, ``by`` of them from one look to the next."""
    for newest in range(world.state.reached + by, last + 1, by):
        world.state.reached = newest
        world.exports.tick()


def next_is(world: World, due: int) -> None:
    """The next export is ordered a few iterations before its own, and none before that."""
    train(world, due - 5)
    assert world.orders() == []
    train(world, due - 4)
    assert world.orders() == TAKE
    assert ordered(world) == due


def finish(world: World, iteration: int) -> None:
    """The export under way, of ``iteration``, is taken, written and published."""
    world.finish(iteration)
    assert ordered(world) is None


def recover(world: World) -> None:
    """The epoch under way is closed, and the next one trains."""
    world.state.phase, world.state.standing_epoch = Phase.CLOSING, None
    world.exports.tick()
    closed = world.state.record.epoch
    world.state.record.epoch = closed + 1
    world.state.lineage.kept |= {closed: world.state.reached, closed + 1: 1 << 62}
    world.state.phase, world.state.standing_epoch = Phase.RUNNING, world.state.record.epoch
    world.exports.tick()
    world.work()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the coordinator's clock shows."""
    now = [1000.0]
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_without_a_number_an_export_follows_half_an_hour_after_the_last_checkpoint(
    tmp_path: Path, clock: list[float]
) -> None:
    world = World(tmp_path)
    clock[0] += 1799
    train(world, 10)
    assert world.orders() == []
    clock[0] += 1
    train(world, 11)
    assert (world.orders(), ordered(world)) == (TAKE, 13)
    clock[0] += 400  # so long it takes: the next one comes after nine times that
    finish(world, 13)
    clock[0] += 3599
    train(world, 20)
    assert world.orders() == []
    clock[0] += 1
    train(world, 21)
    assert (world.orders(), ordered(world)) == (TAKE, 23)
    no_room(world)
    train(world, 30)
    assert world.orders() == DROP, "it is not tried at once again"
    clock[0] += 1800
    train(world, 31)
    assert world.orders() == TAKE
    recover(world)
    assert world.orders() == [*DROP, *TAKE]


def test_off_is_never(tmp_path: Path, clock: list[float]) -> None:
    world = World(tmp_path, persist_interval="off")
    assert not world.exports.is_used
    clock[0] += 1e6
    train(world, 10)
    assert world.orders() == []


@pytest.mark.parametrize("interval", [30, 40, 500])
def test_an_export_is_ordered_a_few_iterations_before_its_own(
    tmp_path: Path, interval: int
) -> None:
    """Its limit and the memory for it begin with the order, however slow the steps are."""
    world = World(tmp_path, persist_interval=interval)
    for due in (interval, 2 * interval):
        next_is(world, due)
        train(world, due + 1)
        finish(world, due)


def test_an_iteration_that_was_jumped_over_is_made_up_for_by_the_next_that_can_be_had(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, persist_interval=100)
    train(world, 90)
    world.state.reached = 150
    world.exports.tick()
    assert ordered(world) == 152
    finish(world, 152)
    next_is(world, 200)


def test_an_order_of_the_interval_that_was_too_late_is_given_again_further_ahead(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, persist_interval=100)
    train(world, 96)
    for tried, newest, then in ((100, 101, 105), (105, 106, 114)):
        assert ordered(world) == tried
        world.state.reached = newest
        overwritten(world)
        assert f"no checkpoint of iteration {tried} " in world.complaint()
        world.exports.tick()
        assert ordered(world) == then
    world.orders()
    finish(world, 114)
    train(world, 196)
    assert ordered(world) == 200, "as near as ever"


@pytest.mark.parametrize("is_told_by_a_node", [False, True])
@pytest.mark.parametrize(("newest", "then"), [(26, 30), (28, 30), (29, 31), (31, 33)])
def test_an_iteration_that_a_recovery_kept_from_being_taken_is_taken_after_it(
    tmp_path: Path, newest: int, then: int, is_told_by_a_node: bool
) -> None:
    """Or the next one that can be had, where the recovery goes on from behind it."""
    world = World(tmp_path, persist_interval=30)
    train(world, newest)
    assert ordered(world) == 30
    world.orders()
    if is_told_by_a_node:
        world.hear(1, "failed", text="take: epoch 1 was closed")
    recover(world)
    assert world.orders() == [*DROP, *TAKE]
    assert "no checkpoint of iteration 30 in the background" in world.complaint()
    assert ordered(world) == then
    finish(world, then)
    next_is(world, 60)  # it was made up for once


def test_a_refused_export_is_ordered_once_more_in_the_next_epoch_no_sooner(tmp_path: Path) -> None:
    world = World(tmp_path, persist_interval=30)
    train(world, 26)
    world.orders()
    no_room(world)
    assert world.orders() == DROP
    train(world, 40)
    assert world.orders() == []
    recover(world)
    assert ordered(world) == 42
    no_room(world)
    world.orders()
    next_is(world, 60)
    world.work()


@pytest.mark.parametrize(("newest", "due"), [(10, 30), (27, 30), (29, 60), (31, 60)])
def test_a_coordinator_that_takes_over_goes_on_with_the_next_due_iteration(
    tmp_path: Path, newest: int, due: int
) -> None:
    world = World(tmp_path, persist_interval=30)
    train(world, newest)
    world.sent.clear()
    world.exports = world.takes_over()
    world.exports.tick()
    for finished in range(newest + 1, due - 3):
        assert world.orders() == []
        world.state.reached = finished
        world.exports.tick()
    assert world.orders() == TAKE
    assert ordered(world) == due
