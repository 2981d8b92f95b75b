"""The pure parts of exports: boxes, coverage, marks, state templates, pruning, what is due."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.cluster.coordinator import new_checkpoint
from deadpool_megatron.cluster.coordinator.new_checkpoint import NewCheckpoint
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_valid
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.persist.torch_dist import WritingError, check_cover
from deadpool_megatron.state.template import boxes
from tests.persist.harness.exported import exported, saved_at

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


@given(SHAPES, st.data())
def test_boxes_are_the_run_in_order(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = np.arange(count).reshape(shape)
    found = list(boxes(shape, start, stop))
    elements: list[int] = []
    for box in found:
        cut = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        own = numbers[cut].reshape(-1).tolist()
        assert own == list(range(box.start, box.start + math.prod(box.sizes))), (
            "a box is a run itself"
        )
        elements += own
    assert elements == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.randoms())
def test_only_a_whole_cover_passes(shape, chance):
    count = math.prod(shape)
    cuts = sorted({0, count, *(chance.randrange(count + 1) for _ in range(3))})
    found = [
        (box.offsets, box.sizes)
        for low, high in itertools.pairwise(cuts)
        for box in boxes(shape, low, high)
    ]
    chance.shuffle(found)
    check_cover("key", shape, found)
    with pytest.raises(WritingError, match="key: "):
        check_cover("key", shape, found[1:])
    with pytest.raises(WritingError, match=r"key: .* overlap"):
        check_cover("key", shape, [*found, found[0]])
    with pytest.raises(WritingError, match=r"key: .* exceeds"):
        check_cover("key", [*shape[:-1], shape[-1] - 1], found)


def test_pruning_keeps_newest_and_needed_exports():
    assert new_checkpoint.exports_to_prune(["a", "b", "c"], 2, ()) == ["a"]
    assert new_checkpoint.exports_to_prune(["a", "b", "c"], 0, ()) == []
    assert new_checkpoint.exports_to_prune(["a", "b", "c"], 1, {"a"}) == ["b"]
    assert new_checkpoint.exports_to_prune(["a"], 1, ()) == []


def published(run: RunDirectory, iteration: int) -> Path:
    """An export that becomes valid, and prunes down to two."""
    return exported(run, run.exports, iteration, keep=2)


def test_exports_appear_whole_and_go_in_turn(tmp_path):
    run = RunDirectory(tmp_path)
    new_checkpoint.run_files.unfinished_export(run.exports, "run", "torn").mkdir(parents=True)
    other = new_checkpoint.run_files.unfinished_export(run.exports, "another", "1.1")
    other.mkdir()
    first, second = published(run, 4), published(run, 8)
    assert first.is_dir()
    third = published(run, 12)
    assert sorted(path.name for path in run.exports.iterdir()) == [
        other.name,
        second.name,
        third.name,
        "latest_checkpointed_iteration.txt",
    ]
    assert (run.exports / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert read_valid(run.latest)[0].path == str(third)


def test_export_refuses_a_foreign_checkpoint_at_its_place(tmp_path):
    run = RunDirectory(tmp_path)
    foreign = run.exports / "iter_0000004"
    foreign.mkdir(parents=True)
    with pytest.raises(new_checkpoint.DurableError, match="this run did not export it"):
        published(run, 4)
    assert list(foreign.iterdir()) == []
    assert not run.latest.exists()
    assert not (run.exports / "latest_checkpointed_iteration.txt").exists()


def test_saves_of_the_program_are_never_pruned(tmp_path):
    run = RunDirectory(tmp_path)
    own = run.exports / "iter_0000004"
    own.mkdir(parents=True)
    NewCheckpoint(own, own, saved_at(4, own), run, "run").make_valid()
    for iteration in (4, 8, 12, 16):
        published(run, iteration)
    assert sorted(path.name for path in run.exports.glob("iter_*")) == [
        own.name,
        "iter_0000012",
        "iter_0000016",
    ]


def test_a_save_does_not_fall_back_to_the_checkpoint_of_another_run(tmp_path):
    run, folder = RunDirectory(tmp_path / "run"), tmp_path / "saves"
    run.path.mkdir()
    final = folder / "iter_0000004"
    final.mkdir(parents=True)
    (final / "of another run").touch()
    for epoch in (1, 2):  # the second save repeats the first after a recovery
        temporary = folder / f".{final.name}.epoch{epoch}"
        temporary.mkdir()
        (temporary / f"own{epoch}").touch()
        NewCheckpoint(temporary, final, saved_at(4, final), run, "r2").make_valid()
    assert [path.name for path in final.iterdir()] == ["own1"]
    assert (folder / "iter_0000004.before-r2" / "of another run").exists()
    assert not list(folder.glob(".iter_*"))


def unfinished_save(folder: Path, iteration: int, epoch: int) -> tuple[Path, Path, Restore]:
    final = folder / f"iter_{iteration:07d}"
    temporary = folder / f".{final.name}.epoch{epoch}"
    temporary.mkdir(parents=True)
    (temporary / "rank0").touch()
    return temporary, final, Restore("durable", Generation(epoch, iteration), "save", str(final))


def test_a_late_worker_of_a_closed_epoch_leaves_the_save_of_the_open_one_alone(tmp_path):
    run, folder = RunDirectory(tmp_path), tmp_path / "checkpoints"
    interrupted, _, _ = unfinished_save(folder, 4, epoch=1)
    late, under_way = unfinished_save(folder, 8, epoch=2), unfinished_save(folder, 12, epoch=3)
    beside, _, _ = unfinished_save(folder, 10, epoch=2)
    NewCheckpoint(*late, run, "run").make_valid()
    assert not interrupted.exists()
    assert (under_way[0] / "rank0").exists()
    assert (beside / "rank0").exists(), "a save of the same epoch may be under way as well"
    NewCheckpoint(*under_way, run, "run").make_valid()
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000008", "iter_0000012"]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_save_does_not_count_whose_epoch_was_closed_while_it_was_synced(tmp_path, in_place):
    run = RunDirectory(tmp_path)
    temporary, final, restore = unfinished_save(tmp_path / "checkpoints", 4, epoch=1)
    place = temporary if in_place else final
    with pytest.raises(new_checkpoint.DurableError, match="its epoch was closed"):
        NewCheckpoint(temporary, place, restore, run, "run", is_current=lambda: False).make_valid()
    assert not final.exists()
    assert not run.latest.exists()
    assert not run.named.exists()


@pytest.mark.parametrize("moment", ["begins", "synced", "waits"])
@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_save_that_two_coordinators_make_valid_is_there_once(
    tmp_path, moment, *, is_foreign, monkeypatch
):
    """A coordinator takes over while the former coordinator syncs files, and then continues."""
    run, folder = RunDirectory(tmp_path), tmp_path / "checkpoints"
    temporary, final, restore = unfinished_save(folder, 4, epoch=1)
    if is_foreign:
        final.mkdir()
        (final / "of another run").touch()
    sync_all = new_checkpoint._sync_all

    def other() -> None:
        monkeypatch.setattr(new_checkpoint, "_sync_all", sync_all)
        NewCheckpoint(temporary, final, restore, run, "run").make_valid()

    def sync(directory: Path) -> None:
        if moment == "begins":
            other()
        sync_all(directory)
        if moment == "synced":
            other()

    def counts() -> bool:
        if moment == "waits":
            other()
        return True

    monkeypatch.setattr(new_checkpoint, "_sync_all", sync)
    NewCheckpoint(temporary, final, restore, run, "run", counts).make_valid()
    assert [path.name for path in final.iterdir()] == ["rank0"]
    assert read_valid(run.latest)[0].path == str(final)
    renamed = ["iter_0000004.before-run"] if is_foreign else []
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000004", *renamed]
