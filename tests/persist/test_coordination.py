"""The coordinator's part of exports: orders in turn, one line for each way to fail."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator import checkpoints, durable
from deadpool_megatron.cluster.coordinator.succession import RecoveredState
from deadpool_megatron.cluster.machine.inputs import DurableValid
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.cluster.run_directory import directory
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, Restore
from tests.persist.harness.world import World, no_room


@pytest.fixture
def world(tmp_path: Path) -> World:
    """It exports every fourth iteration."""
    return World(tmp_path, persist_interval=4)


@pytest.mark.parametrize(
    ("newest", "every", "due"), [(0, 1, 4), (2, 1, 4), (3, 1, 8), (0, 3, 6), (5, 3, 9)]
)
def test_what_is_due(world: World, newest: int, every: int, due: int) -> None:
    """Every fourth iteration, two ahead at least, of those that are generations at all."""
    world.state.record.protection.every = every
    for finished in range(newest, due - 1):
        world.state.reached = finished
        world.exports.tick()
    assert world.exports.status()["now"]["iteration"] == due


def finish(world: World) -> None:
    world.state.phase = Phase.ENDING


def test_a_recovery_does_not_end_an_export_of_a_committed_generation(
    world: World, tmp_path: Path
) -> None:
    world.exports.tick()
    world.taken(4)
    world.written()
    world.state.standing_epoch, world.state.phase = None, Phase.CLOSING
    world.exports.tick()
    assert not world.tasks, "it waits for the decision"
    world.state.lineage.kept = {1: 4, 2: 1 << 62}
    world.state.record.epoch, world.state.standing_epoch, world.state.phase = 2, 2, Phase.RUNNING
    world.exports.tick()
    world.work()
    assert (tmp_path / "exports" / "iter_0000004").is_dir()


def test_the_end_of_a_run_waits_for_an_export_that_is_set_aside(
    world: World, tmp_path: Path
) -> None:
    world.exports.tick()
    finish(world)
    world.state.reached = 4
    world.exports.tick()
    world.taken(4)
    world.written()
    assert world.exports.under_way() == ["the background checkpoint of iteration 4"]
    world.exports.tick()
    world.work()
    assert (tmp_path / "exports" / "iter_0000004").is_dir()
    assert world.exports.under_way() == []


def published_during_a_recovery(world: World, kept: dict[int, int]) -> list[Path]:
    """The exports that are there after two, the second one published while a recovery decides."""
    for iteration in (4, 8):
        world.exports.tick()
        world.taken(iteration)
        world.written()
        world.orders()
        world.exports.tick()
        if iteration == 8:  # between the tick that begins to publish and its work
            world.state.lineage.kept, world.state.phase = kept, Phase.OPENING
        world.work()
        world.state.reached = iteration
    return sorted(world.run.exports.glob("iter_*"))


def test_a_recovery_loads_from_an_export_that_nobody_prunes_meanwhile(tmp_path: Path) -> None:
    world = World(tmp_path, persist_interval=4, persist_keep=1)
    found = published_during_a_recovery(world, {1: 1 << 62})
    assert [path.name for path in found] == ["iter_0000004", "iter_0000008"]
    assert directory.read_json(world.run.exported)["paths"] == [
        str(path.relative_to(world.run.path)) for path in found
    ]


def test_a_line_left_while_an_export_is_published_takes_it_along(world: World) -> None:
    found = published_during_a_recovery(world, {2: 1 << 62})
    assert [path.name for path in found] == ["iter_0000004"]
    assert world.fed == [DurableValid(4, str(found[0]))]
    assert "from an earlier state" in world.complaint()
    world.work()


def test_a_save_that_an_export_has_overtaken_is_not_gone_back_to(
    world: World, tmp_path: Path
) -> None:
    world.exports.tick()
    world.finish(4)
    exported = Restore("durable", Generation(0, 4), "save", str(tmp_path / "exports/iter_0000004"))
    world.state.lineage.valid = (exported,)
    saved = tmp_path / "saves" / "iter_0000003"
    saved.mkdir(parents=True)
    place = {"temporary": str(saved), "final": str(saved)}
    asyncio.run(world.exports.save({"epoch": 1, "iteration": 3, **place}))
    assert world.done == [3]
    assert world.fed == [DurableValid(4, exported.path), DurableValid(3, str(saved))]
    assert directory.read_valid(world.run.latest)[0].path == exported.path


def test_what_the_program_has_loaded_can_be_fallen_back_to_and_stays_whose_it_is(
    world: World, tmp_path: Path
) -> None:
    """It is told while the epoch is opened."""
    loaded = tmp_path / "others" / "iter_0000003"
    loaded.mkdir(parents=True)
    (loaded / "data").touch(0o400)
    place = {"temporary": str(loaded), "final": str(loaded), "loaded": True}
    asyncio.run(world.exports.save({"epoch": 1, "iteration": 3, **place}))
    assert world.fed == [DurableValid(3, str(loaded))]
    (noted,) = directory.read_valid(world.run.latest)
    assert (noted.path, noted.identity) == (str(loaded), world.fed[0].identity)
    assert noted.identity
    assert not world.run.named.exists()
    assert world.exports.loaded == {str(loaded)}
    world.recovered(RecoveredState(valid=(noted,)))
    assert world.takes_over().loaded == {str(loaded)}, "a successor knows it as well"


def test_a_save_that_is_asked_for_again_is_made_valid_once(tmp_path: Path) -> None:
    """A coordinator that takes over hears of it as what the agent said last, and once more as what
    its members have said."""
    world = World(tmp_path)
    saved = tmp_path / "saves" / "iter_0000003"
    saved.mkdir(parents=True)
    place = {"temporary": str(saved), "final": str(saved)}

    async def ask_twice() -> None:
        asked = (world.exports.save({"epoch": 1, "iteration": 3, **place}) for _ in range(2))
        await asyncio.gather(*asked)

    asyncio.run(ask_twice())
    assert world.done == [3]
    assert [event.kind for event in world.events] == [Kind.DURABLE]
    asyncio.run(world.exports.save({"epoch": 1, "iteration": 3, **place}))
    assert world.done == [3, 3], "who asks later has not heard the answer"


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_save_of_another_epoch_does_not_count(tmp_path: Path, epoch: int) -> None:
    world = World(tmp_path)
    saved = tmp_path / "saves" / "iter_0000003"
    saved.mkdir(parents=True)
    place = {"temporary": str(saved), "final": str(saved)}
    asyncio.run(world.exports.save({"epoch": epoch, "iteration": 3, **place}))
    assert (world.done, world.fed) == ([], [])


def test_a_disk_that_hangs_keeps_no_thread_from_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export that it costs is to be removed there, and the journal needs threads as well."""
    answers = threading.Event()
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *_, **__: answers.wait(20.0))
    world.exports.tick()
    no_room(world)

    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        (removal,) = map(asyncio.ensure_future, world.tasks)
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5.0):
                await asyncio.to_thread(directory.write_json, world.run.coordinator, {})
        finally:
            answers.set()
            await removal

    asyncio.run(story())


def test_what_is_removed_cannot_be_published_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a coordinator that was thought dead while its files were synced."""
    run, final = directory.RunDirectory(tmp_path), tmp_path / "exports" / "iter_0000004"
    left = directory.unfinished_export(final.parent, "id", "1.3")
    left.mkdir(parents=True)
    (left / "__0_0.distcp").touch()
    restore = Restore("durable", Generation(1, 4), "save", str(final))
    rmtree = shutil.rmtree

    def publish_first(path: Path) -> None:
        with pytest.raises(durable.DurableError):
            durable.NewCheckpoint(left, final, restore, run, "id").publish()
        rmtree(path)

    monkeypatch.setattr(durable.shutil, "rmtree", publish_first)
    durable.remove_unfinished(final.parent, "id", 2)
    assert list(final.parent.iterdir()) == []
