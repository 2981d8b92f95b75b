"""Checkpoints are on the disk before anything names them, and outlive a power failure."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deadpool_megatron.cluster.coordinator import new_checkpoint
from deadpool_megatron.cluster.coordinator.new_checkpoint import DurableError, NewCheckpoint
from deadpool_megatron.cluster.run_directory import directory, directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.layout.records import Generation, PartInfo, Restore, RoleLayout
from deadpool_megatron.settings import Settings
from deadpool_megatron.state import frozen_file
from deadpool_megatron.vault.disk.dump import dump_held
from deadpool_megatron.vault.shm.segment import Segment, checksum, copy_name
from tests.persist.harness.exported import exported, saved_at
from tests.vault.slots import SlotStore, scheme_of


@pytest.fixture
def synced(monkeypatch):
    """The files and directories that were synced, in order, by the names that they had then."""
    found: list[Path] = []
    fsync = os.fsync

    def note(handle: int) -> None:
        fsync(handle)
        found.append(Path(f"/proc/self/fd/{handle}").readlink())

    monkeypatch.setattr(os, "fsync", note)
    return found


def synced_before(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, synced: list[Path]
) -> list[set[Path]]:
    """Return the synced files at each call of a function."""
    found: list[set[Path]] = []
    original: Callable[..., Any] = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        found.append(set(synced))
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return found


def test_all_of_a_save_in_place_is_on_the_disk_before_it_counts(tmp_path, monkeypatch, synced):
    """As Megatron saves: it syncs the tensors, but neither common.pt nor metadata.json."""
    run, saved = RunDirectory(tmp_path), tmp_path / "saves" / "iter_0000004"
    saved.mkdir(parents=True)
    files = [saved / name for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json")]
    for path in files:
        path.write_text("x")
    before = synced_before(monkeypatch, directory, "write_json", synced)
    NewCheckpoint(saved, saved, saved_at(4, saved), run, "run").make_valid()
    (on_disk,) = before
    assert {*files, saved, saved.parent} <= on_disk


def test_pointers_to_an_export_are_synced_before_older_exports_go(tmp_path, monkeypatch, synced):
    run, replaced = RunDirectory(tmp_path / "run"), dict[Path, int]()
    replace = Path.replace

    def note(path: Path, target: Path) -> Path:
        answer = replace(path, target)
        replaced[target] = len(synced)
        return answer

    monkeypatch.setattr(Path, "replace", note)
    final = tmp_path / "exports" / "iter_0000004"
    unfinished = run_files.unfinished_export(final.parent, "run", "1.1")
    unfinished.mkdir(parents=True)
    run.path.mkdir()
    NewCheckpoint(unfinished, final, saved_at(4, final), run, "run").publish()
    tracker = final.parent / "latest_checkpointed_iteration.txt"
    assert {tracker, run.latest} <= set(replaced)
    for path, moment in replaced.items():
        assert path.parent in synced[moment:], path


def test_a_checkpoint_that_its_tracker_names_is_not_pruned(tmp_path):
    """As after a start with another directory for exports: no newer one comes to the first."""
    run, first, second = RunDirectory(tmp_path), tmp_path / "first", tmp_path / "second"
    gone, kept = exported(run, first, 4, keep=1), exported(run, first, 8, keep=1)
    assert not gone.exists()
    assert (first / "latest_checkpointed_iteration.txt").read_text() == "8"
    newest = [exported(run, second, iteration, keep=1) for iteration in (12, 16)][-1]
    assert kept.is_dir()
    assert list(second.glob("iter_*")) == [newest]


def test_an_older_save_that_becomes_valid_meanwhile_does_not_hide_an_export(tmp_path, monkeypatch):
    run, saved = RunDirectory(tmp_path), tmp_path / "saves" / "iter_0000004"
    saved.mkdir(parents=True)
    known_in = directory.still_valid
    exporting = threading.Thread(target=exported, args=(run, tmp_path / "exports", 8, 1))

    def known(*of: Any) -> list[Restore]:
        monkeypatch.setattr(new_checkpoint.run_files, "still_valid", known_in)
        found = known_in(*of)
        exporting.start()
        exporting.join(1.0)  # where it does not wait for us it is done
        return found

    monkeypatch.setattr(new_checkpoint.run_files, "still_valid", known)
    NewCheckpoint(saved, saved, saved_at(4, saved), run, "run").make_valid()
    exporting.join()
    assert run_files.read_valid(run.latest)[0].generation == Generation(1, 8)


def test_an_export_that_has_its_name_but_no_pointer_is_pruned_in_its_turn(tmp_path, monkeypatch):
    """The disk was full then, or the coordinator ended: no other process would ever remove it."""
    run, folder = RunDirectory(tmp_path), tmp_path / "exports"

    def full(_: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(new_checkpoint, "_tracked_iteration", full)
        with pytest.raises(DurableError, match="No space left"):
            exported(run, folder, 4, keep=1)
    assert (folder / "iter_0000004").is_dir()
    kept = exported(run, folder, 8, keep=1)
    assert list(folder.glob("iter_*")) == [kept]


def test_a_dump_and_frozen_weights_have_their_names_on_the_disk(tmp_path, synced):
    """After a dump the memory is given back: nothing else has the state then."""
    layout = RoleLayout(0, (PartInfo("shard", 64, (0,)),), (0,), 1, "hash")
    node = tmp_path / "node0"
    node.mkdir()
    segment = Segment.create(node / copy_name(0), layout, None, ("shard",))
    segment.open_slot(0, Generation(1, 4), 1)
    segment.seal_part(0, "shard", 8, checksum(segment.data(0, "shard", 8)), 1)
    state = SlotStore(scheme_of, 0, node, Settings(), lambda _: None)
    state.table.scan()
    (written,) = dump_held(state, tmp_path / "dump", [Generation(1, 4)])
    assert {Path(written).parent, tmp_path / "dump"} <= set(synced)

    folder, tensors = tmp_path / "run" / "frozen", [("base", torch.arange(10.0))]
    name = frozen_file.name_of(tensors, time.sleep)
    frozen_file.write(folder, name, tensors, time.sleep)
    assert folder in synced
    synced.clear()
    frozen_file.copy_files(folder, tmp_path / "next")
    assert tmp_path / "next" in synced


@pytest.mark.parametrize("make", ["save", "export"])
def test_unloadable_checkpoint_is_replaced_by_a_later_save(make, tmp_path):
    """The run has gone back before it, and trains the same iteration again."""
    run, folder = RunDirectory(tmp_path), tmp_path / "saves"
    older, final = folder / "iter_0000002", folder / "iter_0000004"

    def written(content: str, iteration: int, struck: tuple[str, ...] = ()) -> None:
        to = folder / f"iter_{iteration:07d}"
        temporary = folder / f".{to.name}.epoch2"
        temporary.mkdir(parents=True)
        (temporary / ".metadata").write_text(content)
        new = NewCheckpoint(temporary, to, saved_at(iteration, to), run, "run", invalidated=struck)
        (new.make_valid if make == "save" else new.publish)()

    written("older", 2)
    written("first", 4)
    written("same", 4)
    assert (final / ".metadata").read_text() == "first", "of the same iteration, it is the same"
    written("anew", 4, (str(final), str(older)))
    assert (final / ".metadata").read_text() == "anew"
    assert (folder / "iter_0000004.before-run" / ".metadata").read_text() == "first"
    assert [restore.path for restore in directory.read_valid(run.latest)] == [str(final)], (
        "2 is struck off"
    )
    written("again", 4, (str(final),))
    assert len(list(folder.glob("*.before-run*"))) == 2
