"""Several agents resume a run together: the one that decides waits for what others may have."""

import argparse
import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import resuming
from deadpool_megatron.cli.start.resuming import Others, bring_frozen_weights, resume_point
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunInfo,
    as_dict,
    take_saves,
    unfinished_export,
    valid_in,
    write_json,
)
from deadpool_megatron.layout.history import NO_LIMIT, History
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.persist import frozen_file
from deadpool_megatron.settings import Settings

INFO = RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings())
ARGS = argparse.Namespace(nodes=2, nproc_per_node=1)
WHOLE = Restore("dump", Generation(1, 7), path="dump/1-7")


class Host:
    """A resuming agent of node 0, with a checkpoint of iteration 5 and half of generation 1:7."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.old, self.new = RunDirectory(tmp_path / "old"), RunDirectory(tmp_path / "new")
        self.old.create(INFO)
        durable = Restore("durable", Generation(1, 5), path=str(tmp_path))
        write_json(self.old.latest, durable.to_dict())
        self.looks, self.pauses = 0, 0
        self.others = Others(self.new, 2, 0, 60.0)
        monkeypatch.setattr(resuming, "dump_orphans", lambda *_: [])
        monkeypatch.setattr(resuming, "newest_whole", self.look)
        monkeypatch.setattr(resuming.time, "sleep", self.pause)

    def look(self, *_: object) -> tuple[Restore | None, list[str]]:
        self.looks += 1
        if self.pauses:
            return WHOLE, []
        return None, ["generation 1:7 lacks role 1"]

    def pause(self, _: float) -> None:
        """Node 1 has written its half."""
        self.pauses += 1
        Others(self.new, 2, 1, 60.0).done()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("status", "said"),
    [(0, "is complete (20 iterations), and has no durable state"), (1, "run has no durable state")],
)
def test_a_run_that_has_left_nothing_says_how_it_ended(host: Host, status: int, said: str) -> None:
    host.old.latest.unlink()
    write_json(host.old.final, {"exit_status": status, "reason": "", "iterations": 20})
    with pytest.raises(CommandError, match=re.escape(said)):
        resume_point(host.old, ARGS)


def test_a_run_that_had_computed_nothing_is_begun_again(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(host.old.latest, Restore("initial", Generation(0, 0)).to_dict())
    resume_point(host.old, ARGS)
    assert "that run had computed nothing: begins at iteration 0" in capsys.readouterr().out


def test_what_another_host_writes_is_waited_for(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    found = valid_in(resume_point(host.old, ARGS, host.others))
    assert [(one.kind, one.generation.iteration) for one in found] == [("dump", 7), ("durable", 5)]
    assert host.pauses == 1
    (line, _) = capsys.readouterr().out.splitlines()
    assert "generation 1:7 lacks role 1; waits for the other agents" in line


@pytest.mark.parametrize("how", ["all have looked", "alone", "somebody has decided"])
def test_there_is_nobody_to_wait_for(host: Host, how: str) -> None:
    others: Others | None = host.others
    if how == "all have looked":
        Others(host.new, 2, 1, 60.0).done()
    elif how == "somebody has decided":
        host.new.create(INFO)
    else:
        others = None
    assert resume_point(host.old, ARGS, others)["kind"] == "durable"
    assert host.pauses == 0


def test_the_wait_ends(host: Host) -> None:
    host.others.patience_seconds = -1.0
    assert resume_point(host.old, ARGS, host.others)["kind"] == "durable"
    assert host.looks == 1


def test_frozen_weights_come_along_with_a_dump_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = RunDirectory(tmp_path / "old"), RunDirectory(tmp_path / "new")
    old.frozen.mkdir(parents=True)
    (old.frozen / "0123-4567").write_bytes(b"weights")
    for path, kind in ((None, "initial"), (old.path, "durable")):
        bring_frozen_weights(path, new, {"kind": kind})
    assert not new.frozen.exists()
    bring_frozen_weights(old.path, new, WHOLE.to_dict())
    assert (new.frozen / "0123-4567").read_bytes() == b"weights"

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(frozen_file, "bring", is_full)
    with pytest.raises(CommandError, match=r"7 bytes.* No space left on device; make room") as told:
        bring_frozen_weights(old.path, new, WHOLE.to_dict())
    assert "\n" not in str(told.value)


def test_a_dump_that_is_not_whole_any_more_is_not_gone_on_from(host: Host) -> None:
    """The newest state that the run has told of; somebody has removed a file of it."""
    dump = host.old.dump / "1-9"
    dump.mkdir(parents=True)
    write_json(host.old.latest, Restore("dump", Generation(1, 9), path=str(dump)).to_dict())
    with pytest.raises(CommandError, match=r"dump/1-9 lacks the layout of role 0"):
        resume_point(host.old, ARGS)
    host.pauses = 1  # an older one is whole
    assert resume_point(host.old, ARGS) == WHOLE.to_dict()


def test_another_number_of_roles_goes_on_from_a_checkpoint(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest one; a dump is of the roles that wrote it."""
    fewer = argparse.Namespace(nodes=1, nproc_per_node=1, command=["train.py"])
    saved = Restore("durable", Generation(1, 5), path=str(tmp_path))
    dump = Restore("dump", Generation(1, 9), path=str(tmp_path))
    monkeypatch.setattr(resuming, "last_boundary", lambda *_: ("step", ""))
    write_json(host.old.latest, as_dict([dump, saved]))
    assert Restore.from_dict(resume_point(host.old, fewer)) == saved
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"continues with 1 roles instead of 2 from the checkpoint {tmp_path} of")
    assert line.endswith("its dump of iteration 9 is for 2 roles only")
    write_json(host.old.latest, dump.to_dict())
    with pytest.raises(CommandError, match=r"2 roles, this one 1, .* give as many nodes as it had"):
        resume_point(host.old, fewer)
    fewer.command = ["-m", "deadpool_megatron.trainer"]
    with pytest.raises(CommandError, match="embedded trainer"):
        resume_point(host.old, fewer)


def test_a_checkpoint_that_was_taken_back_is_not_gone_on_from(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It became valid, then its loss turned out to be none, and the run went back behind it."""
    taken_back = Restore("durable", Generation(1, 9), path=str(tmp_path))
    write_json(host.old.latest, taken_back.to_dict())
    assert Restore.from_dict(resume_point(host.old, ARGS)) == taken_back
    history = History({1: 7, 2: NO_LIMIT}, nonfinite={8: 1})
    monkeypatch.setattr(resuming, "last_history", lambda *_: history)
    with pytest.raises(CommandError, match="numbers that were not finite") as told:
        resume_point(host.old, ARGS)
    assert "\n" not in str(told.value)
    host.pauses = 1  # what lay in memory is whole
    assert resume_point(host.old, ARGS) == WHOLE.to_dict()


def test_unfinished_exports_of_the_run_before_are_removed(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that was killed while it exported; its number is gone with it."""
    exports = tmp_path / "exports"
    info = replace(INFO, settings=Settings(persist_directory=str(exports)))
    write_json(host.old.path / "run.json", info.to_dict())
    left = unfinished_export(exports, INFO.run_id, "1.7")
    others, whole = unfinished_export(exports, "89abcdef", "1.1"), exports / "iter_0000004"
    for directory in (left, others, whole):
        directory.mkdir(parents=True)
        (directory / "__0_0.distcp").touch()
    monkeypatch.setattr(resuming, "run_processes", lambda *_: {1: 1})
    resume_point(host.old, ARGS)
    assert left.exists(), "the run is alive"
    monkeypatch.setattr(resuming, "run_processes", lambda *_: {})
    resume_point(host.old, ARGS)
    assert sorted(exports.iterdir()) == [others, whole]


@pytest.mark.parametrize(
    ("hurt", "left"),
    [
        ((), [30, 20, 10]),
        ((30,), [20, 10]),
        ((20,), [30, 10]),
        ((30, 20), [10]),
        ((30, 20, 10), []),
    ],
)
@pytest.mark.parametrize("how", ["gone", "without its index", "empty"])
def test_each_checkpoint_is_looked_at_and_the_older_ones_come_along(
    host: Host, hurt: tuple[int, ...], left: list[int], how: str, tmp_path: Path
) -> None:
    """30 and 20 were saved by the run, 10 is what it had begun with itself."""
    saved = []
    for k in (30, 20, 10):
        place = tmp_path / f"{k}"
        saved.append(Restore("durable", Generation(1, k), path=str(place)))
        if k in hurt and how == "gone":
            continue
        place.mkdir()
        if k not in hurt or how != "empty":
            (place / "__0_0.distcp").touch()
        if k not in hurt:
            (place / ".metadata").touch()
    host.old.replace_run(replace(INFO, restore=saved[2].to_dict()))
    write_json(host.old.latest, as_dict(saved[:2]))
    if not left:
        with pytest.raises(CommandError, match="30 does not exist any more") as told:
            resume_point(host.old, ARGS)
        assert "\n" not in str(told.value)
        return
    found = valid_in(resume_point(host.old, ARGS))
    assert [one.generation.iteration for one in found] == left


@pytest.mark.parametrize(
    ("shards", "index", "wanted"),
    [(20, 30, [9, 5]), (20, 20, [9, 5]), (20, 15, [5]), (20, None, [5]), (5, 6, [5])],
    ids=["whole", "at once", "being written anew", "without its index", "of an earlier run"],
)
def test_what_nobody_was_told_of_is_found_by_looking(
    host: Host, shards: int, index: int | None, wanted: list[int], tmp_path: Path
) -> None:
    """The program saves from second 10 on."""
    place = tmp_path / "saves" / "iter_0000009"
    place.mkdir(parents=True)
    (place / "metadata.json").touch()
    take_saves(host.old, place.parent)
    os.utime(host.old.saves, (10, 10))
    for name, seconds in (("__0_0.distcp", shards), (".metadata", index)):
        if seconds is not None:
            (place / name).touch()
            os.utime(place / name, (seconds, seconds))
    found = valid_in(resume_point(host.old, ARGS))
    assert [one.generation.iteration for one in found] == wanted


def test_notes_for_processes_that_come_later_come_along(tmp_path: Path) -> None:
    """Else no spare of the new run would ever be built before it is needed."""
    old, new = RunDirectory(tmp_path / "old"), RunDirectory(tmp_path / "new")
    for run in (old, new):
        run.make()
    resuming.bring_notes(old.path, new)
    assert not new.built.exists()
    old.built.write_text("[]")
    resuming.bring_notes(old.path, new)
    assert new.built.read_text() == "[]"
