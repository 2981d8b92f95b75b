"""Small files of a run that a crash or a hand has damaged: a line, not the end of a coordinator."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import resuming
from deadpool_megatron.cluster.coordinator.durable import (
    DurableError,
    make_valid,
)
from deadpool_megatron.cluster.coordinator.succession import valid_checkpoints
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunInfo,
)
from deadpool_megatron.persist.skeleton import (
    Skeleton,
    SkeletonError,
    read_skeleton,
    skeleton_path,
    write_skeleton,
)
from deadpool_megatron.settings import Settings
from tests.persist.harness.exported import exported, saved_at

INFO = RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings(), "/dev/shm/x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation", None),
        ("generation", [float("inf"), 2]),
        ("generation", "none"),
        ("path", None),
        ("sources", []),
        ("sources", {"0": {"shard": 1}}),
        ("recipes", {"0": {}}),
    ],
)
def test_what_the_newest_checkpoint_is_named_in(tmp_path: Path, name: str, value: Any) -> None:
    """``path``: it is left out."""
    run = RunDirectory(tmp_path)
    values = {**saved_at(4, tmp_path).to_dict(), name: value}
    run.latest.write_text(json.dumps({k: v for k, v in values.items() if (k, v) != ("path", None)}))
    with pytest.raises(ValueError, match=r"latest\.json is damaged"):
        valid_checkpoints(run)
    assert resuming._durable(run, INFO, None) == ([], [f"{run.latest} is damaged"])
    final = exported(run, tmp_path / "exports", 8)
    assert [one.path for one in valid_checkpoints(run)] == [str(final)]


def test_a_newest_checkpoint_that_cannot_be_looked_at(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.latest.mkdir()
    with pytest.raises(CommandError, match=r"latest\.json: Is a directory"):
        resuming._durable(run, INFO, None)


@pytest.mark.parametrize("text", ["[]", "{}", '{"paths": null}', "[" * 100000, "\0"])
def test_the_list_of_exports(tmp_path: Path, text: str) -> None:
    """The export counts all the same."""
    run = RunDirectory(tmp_path)
    run.exported.write_text(text)
    with pytest.raises(DurableError, match=r"exported\.json is damaged, nothing is pruned"):
        exported(run, run.exports, 4, keep=1)
    (found,) = valid_checkpoints(run)
    assert found == saved_at(4, run.exports / "iter_0000004")


def test_the_list_of_names_that_was_cut_in_a_character(tmp_path: Path) -> None:
    run, folder = RunDirectory(tmp_path), tmp_path / "donn\N{LATIN SMALL LETTER E WITH ACUTE}es"
    exported(run, folder, 4)
    content = run.named.read_bytes()
    run.named.write_bytes(content[: content.index(b"\xc3") + 1])
    final = exported(run, folder, 8)
    assert exported(run, folder, 8) == final


def test_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    run, folder = RunDirectory(tmp_path / "run"), tmp_path / os.fsdecode(b"donn\xe9es")
    run.path.mkdir()
    final = exported(run, folder, 4)
    (final / "mine").touch()
    assert exported(run, folder, 4) == final
    assert (final / "mine").exists()
    assert not list(folder.glob(".export-*"))
    saved = folder / "saves" / "iter_0000008"
    saved.mkdir(parents=True)
    make_valid(saved, saved, saved_at(8, saved), run, "run")
    assert [one.path for one in valid_checkpoints(run)] == [str(saved), str(final)]


@pytest.mark.parametrize("left", [0, 1, 300, -1])
def test_a_skeleton_that_was_cut(tmp_path: Path, left: int) -> None:
    """The exporter says so in its last line, of which the coordinator makes the warning."""
    write_skeleton(tmp_path, Skeleton(3, "hash"))
    path = skeleton_path(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(SkeletonError, match=r"skeleton-3\.pt is damaged: \w+$"):
        read_skeleton(tmp_path, 3, "hash")
