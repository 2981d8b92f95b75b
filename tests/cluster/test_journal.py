"""Journal: whole or absent, and one winner, whatever is killed when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.journal import DirectoryJournal, JournalError, LostRace


def test_entries_come_back_by_kind_in_order(tmp_path: Path) -> None:
    journal = DirectoryJournal(tmp_path / "journal")
    journal.write("epoch", 2, {"b": 2})
    journal.write("epoch", 1, {"a": 1})
    journal.write("closed", 1, {})
    assert list(journal.entries("epoch").items()) == [(1, {"a": 1}), (2, {"b": 2})]
    assert journal.entries("closed") == {1: {}}
    assert not [p for p in (tmp_path / "journal").iterdir() if p.name.startswith(".")]


def test_second_writer_of_an_epoch_loses(tmp_path: Path) -> None:
    DirectoryJournal(tmp_path).write("epoch", 1, {"by": "first"})
    with pytest.raises(LostRace, match="another coordinator"):
        DirectoryJournal(tmp_path).write("epoch", 1, {"by": "second"})
    assert DirectoryJournal(tmp_path).entries("epoch") == {1: {"by": "first"}}


def test_of_many_processes_exactly_one_wins(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from deadpool_megatron.cluster.journal import DirectoryJournal, LostRace\n"
        "journal = DirectoryJournal(Path(sys.argv[1])); sys.stdin.read(1)\n"
        "try: journal.write('epoch', 1, {'by': sys.argv[2]})\n"
        "except LostRace: sys.exit(5)\n"
    )
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            env={**os.environ, **root},
        )
        for number in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    codes = [writer.wait(30) for writer in writers]
    assert sorted(codes) == [0, 5, 5, 5]
    assert DirectoryJournal(tmp_path).entries("epoch") == {1: {"by": str(codes.index(0))}}


def test_own_success_reported_as_eexist_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link_and_lose_the_answer(source: Any, target: Any) -> None:
        real(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", link_and_lose_the_answer)
    journal = DirectoryJournal(tmp_path)
    journal.write("epoch", 1, {"a": 1})
    assert journal.entries("epoch") == {1: {"a": 1}}


def test_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(JournalError, match="No space left"):
        DirectoryJournal(tmp_path).write("epoch", 1, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", '{"a": 1', "[]", "\x00"])
def test_damaged_entry_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "epoch-00000003.json").write_text(content)
    with pytest.raises(JournalError, match=r"epoch-00000003\.json is damaged"):
        DirectoryJournal(tmp_path).entries("epoch")


def test_foreign_file_is_named_and_temporary_ones_are_skipped(tmp_path: Path) -> None:
    (tmp_path / ".epoch-00000001.json.77.ab").write_text("half")
    assert DirectoryJournal(tmp_path).entries("epoch") == {}
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(JournalError, match=r"notes\.txt does not belong"):
        DirectoryJournal(tmp_path).entries("epoch")


def test_newest_and_sign_of_life(tmp_path: Path) -> None:
    journal = DirectoryJournal(tmp_path)
    assert journal.newest("term") is None
    assert journal.last_beat() == ""
    journal.write("term", 1, {"node": 4})
    journal.write("term", 2, {"node": 5})
    journal.write("epoch", 9, {})
    assert journal.newest("term") == (2, {"node": 5})
    journal.beat("2 17")
    journal.beat("2 8")
    assert DirectoryJournal(tmp_path).last_beat() == "2 8"
    assert list(journal.entries("epoch")) == [9]


def test_file_system_that_is_gone_is_reported_as_trouble_of_the_journal(tmp_path: Path) -> None:
    journal = DirectoryJournal(tmp_path / "journal")
    (tmp_path / "journal").rmdir()
    (tmp_path / "journal").touch()  # every use of the directory fails now, cleaning up too
    with pytest.raises(JournalError, match="cannot write"):
        journal.write("epoch", 1, {})
    with pytest.raises(JournalError, match="cannot read"):
        journal.newest("epoch")
