"""Files of a run name what is its own, wherever its directory is; another's is told apart."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from deadpool_megatron.cluster.journal.journal import Journal, JournalError
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.file_systems import HeldName
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings


def made(path: Path, run_id: str) -> run_files.RunDirectory:
    run = run_files.RunDirectory(path)
    run.create(run_files.RunInfo(run_id, 1, 1, 0, 1, ("x.py",), Settings()))
    return run


def checkpoint(path: Path, content: bytes) -> Restore:
    path.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "metadata.json"):
        (path / name).write_bytes(content if name.endswith(".distcp") else b"{}")
    iteration = int(path.name.removeprefix("iter_"))
    return Restore("durable", Generation(0, iteration), "save", str(path))


def test_moved_run_has_its_own_checkpoints(tmp_path):
    run = made(tmp_path / "run", "00000001")
    saved = checkpoint(run.path / "saves" / "iter_0000004", b"own")
    elsewhere = checkpoint(tmp_path / "saves" / "iter_0000003", b"own")
    run_files.take_saves(run, run.path / "saves")
    os.utime(run.saves, (1, 1))
    run_files.write_latest(run.latest, [saved, elsewhere])
    moved = run_files.RunDirectory(run.path.rename(tmp_path / "moved"))
    other = made(tmp_path / "run", "00000002")
    checkpoint(other.path / "saves" / "iter_0000004", b"another's")
    own = str(moved.path / "saves" / "iter_0000004")
    assert [restore.path for restore in run_files.read_valid(moved.latest)] == [own, elsewhere.path]
    assert [restore.path for restore in run_files.found_in(moved.saves)] == [own]


@pytest.mark.parametrize("nbytes", [3, 5_000_000])
def test_checkpoint_is_identified_by_its_content(tmp_path, nbytes):
    """A copy is, whenever it was made."""
    saved = run_files.with_identity(checkpoint(tmp_path / "iter_0000004", os.urandom(nbytes)))
    kept = Path(saved.path).rename(tmp_path / "kept")
    assert not run_files.is_there(saved)
    checkpoint(Path(saved.path), os.urandom(nbytes))
    assert not run_files.is_there(saved)
    shutil.rmtree(saved.path)
    shutil.copytree(kept, saved.path, copy_function=shutil.copyfile)
    assert run_files.is_there(saved)


def test_dump_is_identified_by_its_run(tmp_path):
    run = made(tmp_path / "run", "00000001")
    dump = run.dump / "1-7"
    dump.mkdir()
    meant = run_files.with_identity(Restore("dump", Generation(1, 7), path=str(dump)))
    assert run_files.is_there(meant)
    run.path.rename(tmp_path / "moved")
    (made(tmp_path / "run", "00000002").dump / "1-7").mkdir()
    assert not run_files.is_there(meant)


def test_files_of_another_run_at_the_same_path_do_not_count(tmp_path):
    run = made(tmp_path / "run", "00000001")
    run.run_id = "00000001"
    journal = Journal(run.journal, run.check_own)
    journal.write("epoch", 1, {"of": "this"})
    run.path.rename(tmp_path / "moved")
    assert not run.has_final()
    with pytest.raises(JournalError, match="cannot read"):
        journal.numbers("epoch")
    other = made(tmp_path / "run", "00000002")
    run_files.write_json(other.final, {"exit_status": 0})
    assert other.has_final()
    assert not run.has_final()
    write = partial(journal.write_heartbeat, "1 1")
    for ask in (journal.read_heartbeat, write, lambda: journal.numbers("epoch")):
        with pytest.raises(JournalError, match="it is the directory of run 00000002 now"):
            ask()
    assert not list(other.journal.iterdir())
    shutil.rmtree(other.path)
    shutil.copytree(tmp_path / "moved", run.path)
    assert journal.numbers("epoch") == [1], "put back it is the run's, as another inode"
    (run.path / "run.json").unlink()
    made(run.path, "00000003")
    with pytest.raises(JournalError, match="it is the directory of run 00000003 now"):
        journal.numbers("epoch")


def test_reading_a_journal_creates_no_run(tmp_path):
    """Where nothing could be read, a run that ends has begun, and keeps its memory."""
    with pytest.raises(JournalError, match="cannot make"):
        Journal(tmp_path / "removed" / "journal")
    assert not (tmp_path / "removed").exists()


def test_partly_made_name_is_made_again(tmp_path):
    """Also where the new file has the inode of the removed file, as a link has."""
    place, kept, made = tmp_path / "run.json", tmp_path / "kept", list[str]()
    kept.touch()
    os.link(kept, place)

    def make() -> None:
        place.unlink(missing_ok=True)
        os.link(kept, place)
        if not made:
            made.append("half")
            raise OSError("its directory is being removed")
        made.append("whole")

    name = HeldName(place, make)
    assert not name.look()
    place.unlink()
    with pytest.raises(OSError, match="being removed"):
        name.look()
    assert name.look()
    assert made == ["half", "whole"]
    assert not name.look()
