"""A run's files go with it, and what a file system does not offer is not what has failed on it."""

import errno
import json
import os
import stat

import pytest

from deadpool_megatron import file_systems
from deadpool_megatron.cluster.journal.journal import Journal, JournalError
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.bad_nodes import BadNode, add_bad_node, read_bad_nodes
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, write_json
from deadpool_megatron.file_systems import write_once
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import create_secret

RUN_ID = "0123abcd"
BAD = BadNode("n1", "hang", 1.0, "4711", "stood still")
NO_LINKS = "has no hard links"


@pytest.mark.parametrize(
    "text", ['{"started": []}', '{"started": null}', '{"started": {"1": [2]}}', "[]", "{"]
)
def test_malformed_listing_names_no_process(text, tmp_path):
    """The launcher reads the coordinator's all the time, and such a listing once ended its run."""
    run = RunDirectory(tmp_path)
    run.node(0).parent.mkdir()
    for path in (run.coordinator, run.node(0)):
        path.write_text(text)
    assert cleanup.coordinator_processes(run) == []
    assert cleanup.node_processes(run, 0) == []


def test_segments_name_the_present_run_directory(tmp_path, monkeypatch):
    """And as held, as long as somebody has the descriptor."""
    monkeypatch.setattr(cleanup.run_files, "segment_root", lambda run_id: tmp_path / "shared")
    for place in ("first", "moved", "moved"):
        held = cleanup.claim_segments(RunDirectory(tmp_path / place), RUN_ID)
        owner = json.loads(cleanup.owner_file(RUN_ID).read_text())
        assert owner == {"run_dir": str(tmp_path / place), "run_id": RUN_ID}
        assert cleanup.is_held(RUN_ID)
        os.close(held)
        assert not cleanup.is_held(RUN_ID)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_directory_without_fsync_is_accepted(tmp_path, monkeypatch, number):
    """As on old CIFS, sshfs and gocryptfs. A disk that fails is another thing."""
    fsync = os.fsync

    def of_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    journal = Journal(tmp_path / "journal")
    if number == errno.EIO:
        with pytest.raises(JournalError, match="Input/output"):
            journal.write("term", 1, {"a": 1})
        return
    journal.write("term", 1, {"a": 1})
    assert journal.read("term", 1) == {"a": 1}
    write_json(tmp_path / "latest.json", {"b": 2}, lasting=True)
    add_bad_node(tmp_path, BAD)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_missing_locks_are_not_taken_for_held_locks(tmp_path, monkeypatch, capfd, number):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_systems.fcntl, "flock", flock)
    add_bad_node(tmp_path, BAD)
    assert [node.host for node in read_bad_nodes(tmp_path)] == ["n1"]
    assert f"no locks here ({os.strerror(number)}), continues without" in capfd.readouterr().err


def test_full_file_system_is_reported_at_once(tmp_path, monkeypatch):
    """What fills it is small at first, so that a start would hang and not say why."""
    fsync = os.fsync

    def quota(handle: int) -> None:
        if os.fstat(handle).st_size > 65536:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", quota)
    info = RunInfo("0123abcd", 1, 1, 0, 1, ("x.py",), Settings())
    with pytest.raises(OSError, match="quota exceeded"):
        RunDirectory(tmp_path).create(info)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
@pytest.mark.parametrize(
    "give",
    [
        lambda folder: write_once(folder / "name", b"it", 0o600),
        create_secret,
        lambda folder: Journal(folder).write("term", 1, {}),
    ],
)
def test_missing_hard_links_are_named(tmp_path, monkeypatch, give, number):
    def link(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "its temporary name")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises((OSError, JournalError), match=NO_LINKS) as caught:
        give(tmp_path)
    assert "temporary" not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
