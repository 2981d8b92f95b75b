"""Checkpoints of Megatron's that nobody has announced: complete, and written in this run."""

import os
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings

BEGIN_SECONDS = 1_000_000


def checkpoint(folder: Path, iteration: int, data: int, index: int) -> Path:
    """Written at these times after the begin of the run, in seconds."""
    path = folder / f"iter_{iteration:07d}"
    path.mkdir()
    for name, seconds in (("a.distcp", data - 1), ("b.distcp", data), (".metadata", index)):
        (path / name).touch()
        os.utime(path / name, times=(BEGIN_SECONDS + seconds,) * 2)
    (path / "metadata.json").touch()
    return path


@pytest.fixture
def saves(tmp_path):
    return taken(tmp_path / "run", tmp_path)


def taken(directory: Path, folder: Path) -> Path:
    """Of a run whose checkpoints are in ``folder``."""
    run, run_id = run_files.RunDirectory(directory), f"0000000{len(directory.name)}"
    run.create(run_files.RunInfo(run_id, 1, 1, 0, 1, ("x.py",), Settings()))
    run_files.take_saves(run, folder)
    os.utime(run.saves, times=(BEGIN_SECONDS,) * 2)
    run_files.take_saves(run, folder)  # by a process that is built later
    return run.saves


def test_found_checkpoints_have_the_newest_first(saves, tmp_path):
    """Their lineage is not known. One is complete with files as old as the run, or as its index."""
    paths = [checkpoint(tmp_path, 4, 0, 0), checkpoint(tmp_path, 12, 7, 9)]
    assert run_files.found_in(saves) == [
        Restore("durable", Generation(0, 12), "save", str(paths[1])),
        Restore("durable", Generation(0, 4), "save", str(paths[0])),
    ]


def test_incomplete_and_earlier_checkpoints_are_not_found(saves, tmp_path):
    checkpoint(tmp_path, 1, -1, 5)
    checkpoint(tmp_path, 2, 5, 4)
    (checkpoint(tmp_path, 3, 5, 5) / ".metadata").unlink()
    (checkpoint(tmp_path, 4, 5, 5) / "metadata.json").unlink()
    assert run_files.found_in(saves) == []


def test_found_checkpoints_skip_unreadable_directories(saves, tmp_path):
    whole = checkpoint(tmp_path, 4, 5, 5)
    (tmp_path / "iter_0000008").mkdir()
    (tmp_path / "iter_0000008" / "metadata.json").touch()
    assert [restore.path for restore in run_files.found_in(saves)] == [str(whole)]
    taken(tmp_path / "later", tmp_path)
    assert run_files.found_in(saves) == []
    run_files.take_saves(run_files.RunDirectory(saves.parent), tmp_path)
    assert [restore.path for restore in run_files.found_in(saves)] == [str(whole)]
    saves.write_text("{")
    assert run_files.found_in(saves) == []
    saves.unlink()
