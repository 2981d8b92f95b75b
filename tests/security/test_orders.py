"""Orders and shared memory that name what is another's: nothing of it is written or removed."""

import os
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator import durable
from deadpool_megatron.cluster.run_directory import cleanup, directory, orphaned_slots as slots
from deadpool_megatron.cluster.run_directory.directory import OutsideError, RunDirectory, write_json
from deadpool_megatron.layout.records import Generation, PartInfo, Restore, RoleLayout
from deadpool_megatron.ownership import OwnershipError
from deadpool_megatron.vault.shm.segment import Segment, copy_name
from tests.persist.test_node import node_of
from tests.security.test_clean import RUN, make_run
from tests.security.users import ATTACKER, VICTIM, as_user, needs_root


@pytest.mark.parametrize(
    "place",
    ["/home/thesis", "/home/.export-0123abcd-1.2/..", "x/.export-0123abcd-1.1", "/", "", "/home"],
)
def test_an_export_is_written_and_removed_under_its_own_name_only(place):
    with pytest.raises(OutsideError):
        directory.export_directory(place, f".export-{RUN}-1.1")


@pytest.mark.parametrize("name", ["../1", "1", "*", "1.1/../..", "", "1.1\n"])
def test_names_of_exports(name):
    with pytest.raises(OutsideError):
        directory.export_name(name)
    directory.export_name("12.345")


async def test_an_order_to_remove_a_directory_of_somebody(tmp_path):
    """Export and drop: whoever gives both has a directory removed."""
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "text").write_text("years of work")
    exports, _, said = node_of(tmp_path)
    facts = {"name": "1.1", "iteration": 1, "dump": {"roles": [0]}, "directory": str(thesis)}
    exports.order({"t": "export-dump", **facts})
    exports.order({"t": "export-drop", "name": "1.1"})
    await exports.close()
    assert (thesis / "text").exists()
    assert said[0]["step"] == "failed"
    assert "is not where this run writes" in said[0]["text"]


def test_dumps_lie_in_the_run_directory(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.dump.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run.path)
    for place in (run.dump, run.dump / "3-17", tmp_path / "link" / "dump" / "3-17"):
        assert directory.dump_directory(str(place), run) == str(place)
    for place in (tmp_path, run.path, run.dump / "x", run.dump / "3-17" / "4-1", Path("/")):
        with pytest.raises(OutsideError):
            directory.dump_directory(str(place), run)


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
def test_a_save_that_names_something_else(tmp_path, temporary, final):
    for name in (temporary, final):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    restore = Restore("durable", Generation(1, 4), "save", str(tmp_path / final))
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    with pytest.raises(durable.DurableError, match="is not where a save"):
        durable.NewCheckpoint(
            tmp_path / temporary, tmp_path / final, restore, run, RUN
        ).make_valid()
    for name in (temporary, final):
        assert (tmp_path / name / "file").exists()


def test_only_checkpoints_are_pruned(tmp_path):
    run, thesis = RunDirectory(tmp_path / "run"), tmp_path / "thesis"
    for path in (run.path, thesis, tmp_path / "iter_0000004"):
        path.mkdir()
    write_json(run.exported, {"paths": [str(thesis), str(tmp_path / "iter_0000004")]})
    durable.remember_and_prune(run, RUN, tmp_path / "iter_0000008", 1, ())
    assert thesis.exists()
    assert not (tmp_path / "iter_0000004").exists()


def refusal(function: object) -> str:
    """The line with which it refuses."""
    assert callable(function)
    try:
        function()
    except OwnershipError as error:
        return str(error)
    return ""


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_directory_that_another_user_made_first(place, mode):
    root = directory.segment_root(RUN)

    def take_the_name() -> None:
        root.mkdir()
        (root / "node0").mkdir()
        for path in (root, root / "node0"):
            path.chmod(mode)

    as_user(ATTACKER, take_the_name)
    run = RunDirectory(place / "run")
    as_user(VICTIM, lambda: cleanup.claim_segments(run, RUN))  # under another name
    as_user(ATTACKER, lambda: (place / f"deadpool-{RUN}.0").mkdir(mode=mode))
    (own,) = {path for path in place.glob(f"deadpool-{RUN}.*") if path.stat().st_uid == VICTIM}
    assert as_user(VICTIM, lambda: directory.segment_root(RUN)) == str(own)
    assert as_user(VICTIM, lambda: cleanup.runs_in_memory()) == str({RUN: run.path})
    if mode == 0o777:
        locked = as_user(VICTIM, lambda: refusal(lambda: slots.claim(root / "node0", 0)))
        assert "not a directory of this user alone" in locked
    assert as_user(VICTIM, lambda: cleanup.node_directories(RUN)) == "[]"
    assert as_user(VICTIM, lambda: cleanup.is_held(RUN)) == "False"
    as_user(VICTIM, lambda: cleanup.clean_run(run, RUN))
    assert (root / "node0").exists()
    assert not own.exists()


@needs_root
def test_a_link_to_a_directory_of_ours(place):
    as_user(VICTIM, lambda: make_run(place / "run", RUN))
    held, other = place / f"deadpool-{RUN}", place / "deadpool-89abcdef"
    as_user(ATTACKER, lambda: other.symlink_to(held))
    run = RunDirectory(place / "other")
    assert as_user(VICTIM, lambda: directory.segment_root("89abcdef").name) != other.name
    as_user(VICTIM, lambda: cleanup.clean_run(run, "89abcdef"))
    assert (held / "node0").exists()


def test_a_segment_is_made_anew_whatever_has_its_temporary_name(tmp_path):
    layout = RoleLayout(0, (PartInfo("shard", 4096, (0,)),), (0,), 2, "hash")
    path = tmp_path / copy_name(0)
    outside = tmp_path / "outside"
    outside.write_bytes(b"not to be touched")
    (tmp_path / f".{path.name}.{os.getpid()}").symlink_to(outside)
    segment = Segment.create(path, layout, None, ())
    segment.data(0, "shard")[:4] = b"mine"
    assert outside.read_bytes() == b"not to be touched"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_segment_that_is_a_link_is_not_opened(tmp_path):
    layout = RoleLayout(0, (PartInfo("shard", 4096, (0,)),), (0,), 2, "hash")
    Segment.create(tmp_path / "away", layout, None, ())
    (tmp_path / copy_name(0)).symlink_to(tmp_path / "away")
    with pytest.raises(OSError, match="symbolic links"):
        Segment.open(tmp_path / copy_name(0))
