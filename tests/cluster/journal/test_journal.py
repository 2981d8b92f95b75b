"""Journal: whole or absent, and one winner, whatever is killed when."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from deadpool_megatron.cluster.journal import journal as journals
from deadpool_megatron.cluster.journal.journal import Journal

Opener = Callable[[], Journal]


@pytest.fixture
def opener(tmp_path):
    """Opens the same journal each time, as other processes do."""
    return lambda: Journal(tmp_path / "journal")


@pytest.mark.parametrize("number", [-1, journals.MAX_NUMBER + 1])
def test_a_number_that_fits_into_no_name_is_not_written(opener, number):
    """With an entry of such a name nothing in the journal could be read any more."""
    with pytest.raises(journals.JournalError, match=f"between 0 and 99999999, not {number}"):
        opener().write("gone", number, {"cause": "left"})
    journals.note_node(opener(), journals.GONE, number, "left")
    for fits in (0, journals.MAX_NUMBER):
        opener().write("gone", fits, {"cause": "left"})
    assert opener().numbers("gone") == [0, journals.MAX_NUMBER]
    assert opener().numbers("term") == []


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [10, 8 << 20])
def test_an_entry_may_be_large(opener, nbytes):
    entry = {"text": os.urandom(nbytes // 2).hex()}  # hardly to be compressed below half
    opener().write("epoch", 1, entry)
    assert opener().newest("epoch") == (1, entry)
    opener().write("epoch", 1, entry)  # as after a failure whose outcome was not known
    with pytest.raises(journals.LostRace):
        opener().write("epoch", 1, {"text": entry["text"][:-1]})
    assert opener().entries("epoch") == {1: entry}


def test_own_success_reported_as_eexist_counts(tmp_path, monkeypatch):
    real = os.link

    def link_and_lose_the_answer(source: Any, target: Any) -> None:
        real(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", link_and_lose_the_answer)
    journal = Journal(tmp_path)
    journal.write("epoch", 1, {"a": 1})
    assert journal.entries("epoch") == {1: {"a": 1}}


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(journals.JournalError, match="No space left"):
        Journal(tmp_path).write("epoch", 1, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", '{"a": 1', "[]", "\x00"])
def test_damaged_entry_is_named(tmp_path, content):
    (tmp_path / "epoch-00000003.json").write_text(content)
    with pytest.raises(journals.JournalError, match=r"epoch-00000003\.json is damaged"):
        Journal(tmp_path).entries("epoch")


def test_foreign_file_is_named_and_temporary_ones_are_skipped(tmp_path):
    (tmp_path / ".epoch-00000001.json.77.ab").write_text("half")
    assert Journal(tmp_path).entries("epoch") == {}
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(journals.JournalError, match=r"notes\.txt does not belong"):
        Journal(tmp_path).entries("epoch")


def test_file_system_that_is_gone_is_reported_as_trouble_of_the_journal(tmp_path):
    journal = Journal(tmp_path / "journal")
    (tmp_path / "journal").rmdir()
    (tmp_path / "journal").touch()  # every use of the directory fails now, cleaning up too
    with pytest.raises(journals.JournalError, match="cannot write"):
        journal.write("epoch", 1, {})
    with pytest.raises(journals.JournalError, match="cannot read"):
        journal.newest("epoch")
