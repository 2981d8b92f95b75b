"""Lines of TensorBoard and console: each once, with stand-ins for Megatron's globals."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.hooks.pretraining.logbook import Logbook


class Writer:
    """Notes what is written, and when it is flushed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.flushed = 0

    def add(self, line: str) -> None:
        self.lines.append(line)

    def flush(self) -> None:
        self.flushed = len(self.lines)


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """megatron.training, as far as a logbook looks at it."""
    training: Any = ModuleType("megatron.training")
    training.global_vars = SimpleNamespace(
        _GLOBAL_TENSORBOARD_WRITER=None, _GLOBAL_WANDB_WRITER=None
    )
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    return training.global_vars


class Book(Logbook):
    """With a writer of the test's own on the last role."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()
        self.purged: list[int | None] = []

    def _open_writers(self, purge_step: int | None) -> None:
        self.purged.append(purge_step)
        self._writer = self.writer
        self._give(self._writer, None)


def write(book: Book, megatron: Any, kind: str, iteration: int) -> None:
    """As Megatron's functions do: to the writer that is there, and to the console."""
    with book.lines(kind, iteration):
        writer = megatron._GLOBAL_TENSORBOARD_WRITER
        if writer is not None:
            writer.add(f"{kind} {iteration}")
        print(f"{kind} {iteration}")


def test_a_repeated_step_is_written_once(megatron: Any, capsys: pytest.CaptureFixture[str]) -> None:
    book = Book()
    book.open(restored=False, first_iteration=1)
    for kind, iteration in (("log", 1), ("log", 2), ("evaluation", 2), ("log", 2), ("log", 3)):
        write(book, megatron, kind, iteration)
    assert book.writer.lines == ["log 1", "log 2", "evaluation 2", "log 3"]
    assert capsys.readouterr().out.split("\n")[:-1] == book.writer.lines
    assert book.writer.flushed == 4
    assert book.purged == [None]


def test_an_adopter_goes_on_where_the_other_may_have_stopped(megatron: Any) -> None:
    book = Book()
    book.open(restored=True, first_iteration=7)
    write(book, megatron, "log", 6)  # is in the other one's file
    write(book, megatron, "log", 7)
    write(book, megatron, "evaluation", 7)
    assert book.writer.lines == ["log 7", "evaluation 7"]
    assert book.purged == [7]
    book.open(restored=True, first_iteration=9)  # a later epoch of the same process
    assert book.purged == [7]


def test_what_train_writes_first_is_not_repeated(megatron: Any) -> None:
    book = Book()
    book.open(restored=False, first_iteration=1)
    assert megatron._GLOBAL_TENSORBOARD_WRITER is book.writer
    book.mute()
    assert megatron._GLOBAL_TENSORBOARD_WRITER is None
    write(book, megatron, "log", 1)
    assert book.writer.lines == ["log 1"]


def test_lines_that_were_cut_off_are_written_again(megatron: Any) -> None:
    book = Book()
    book.open(restored=False, first_iteration=1)
    with pytest.raises(KeyboardInterrupt), book.lines("log", 1):
        raise KeyboardInterrupt
    write(book, megatron, "log", 1)
    assert book.writer.lines == ["log 1"]
