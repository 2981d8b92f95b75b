"""Orders and requests that name paths: nothing outside of the run's own is written or removed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.agent.children.exports import NodeExports
from deadpool_megatron.cluster.coordinator.checkpoints import durable
from deadpool_megatron.cluster.process.local_logs import LocalLogs
from deadpool_megatron.cluster.run_directory import bounds
from deadpool_megatron.cluster.run_directory.bounds import OutsideError
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings

RUN = "0123abcd"


@pytest.mark.parametrize(
    "directory",
    ["/home/thesis", "/home/.export-0123abcd-1.2/..", "x/.export-0123abcd-1.1", "/", "", "/home"],
)
def test_an_export_is_written_and_removed_under_its_own_name_only(directory: str) -> None:
    with pytest.raises(OutsideError):
        bounds.export_directory(directory, f".export-{RUN}-1.1")


@pytest.mark.parametrize("name", ["../1", "1", "*", "1.1/../..", "", "1.1\n"])
def test_names_of_exports(name: str) -> None:
    with pytest.raises(OutsideError):
        bounds.export_name(name)
    bounds.export_name("12.345")


async def test_an_order_to_remove_a_directory_of_somebody(tmp_path: Path) -> None:
    """Export and drop: whoever gives both has a directory removed."""
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "text").write_text("years of work")
    (tmp_path / "segments").mkdir()
    run = RunDirectory(tmp_path / "run")
    (run.path / "logs").mkdir(parents=True)
    info: Any = SimpleNamespace(settings=Settings(), world_size=1, run_id=RUN)
    said: list[Any] = []
    logs = LocalLogs(tmp_path / "segments" / "logs")
    exports = NodeExports(0, run, info, tmp_path / "segments", None, logs, said.append)  # type: ignore[arg-type]
    facts = {"name": "1.1", "iteration": 1, "dump": {"roles": [0]}, "directory": str(thesis)}
    exports.order({"t": "export-dump", **facts})
    exports.order({"t": "export-drop", "name": "1.1"})
    await exports.close()
    assert (thesis / "text").exists()
    assert said[0]["step"] == "failed"
    assert "is not where this run writes" in said[0]["text"]


def test_dumps_lie_in_the_run_directory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.dump.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run.path)
    for directory in (run.dump, run.dump / "3-17", tmp_path / "link" / "dump" / "3-17"):
        assert bounds.dump_directory(str(directory), run) == str(directory)
    for directory in (tmp_path, run.path, run.dump / "x", run.dump / "3-17" / "4-1", Path("/")):
        with pytest.raises(OutsideError):
            bounds.dump_directory(str(directory), run)


@pytest.mark.parametrize(
    ("temporary", "final"),
    [
        ("thesis", "iter_0000004"),
        (".iter_0000004.epoch2", "thesis"),
        (".iter_0000005.epoch2", "iter_0000004"),
        ("other/.iter_0000004.epoch2", "iter_0000004"),
        (".iter_0000004.epoch", "iter_0000004"),
    ],
)
def test_a_save_that_names_something_else(tmp_path: Path, temporary: str, final: str) -> None:
    for name in (temporary, final):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    restore = Restore("durable", Generation(1, 4), "save", str(tmp_path / final))
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    with pytest.raises(durable.DurableError, match="is not where a save"):
        durable.make_valid(tmp_path / temporary, tmp_path / final, restore, run, RUN)
    for name in (temporary, final):
        assert (tmp_path / name / "file").exists()


def test_only_checkpoints_are_pruned(tmp_path: Path) -> None:
    run, thesis = RunDirectory(tmp_path / "run"), tmp_path / "thesis"
    for path in (run.path, thesis, tmp_path / "iter_0000004"):
        path.mkdir()
    write_json(run.exported, {"paths": [str(thesis), str(tmp_path / "iter_0000004")]})
    durable.remember_and_prune(run, RUN, tmp_path / "iter_0000008", 1, ())
    assert thesis.exists()
    assert not (tmp_path / "iter_0000004").exists()
