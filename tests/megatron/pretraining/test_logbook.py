"""Lines of TensorBoard and console: each once, with stand-ins for Megatron's globals."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.megatron.pretraining.logbook import Logbook, name_run


class Writer:
    """Notes what is written, and puts it into a file when it is flushed."""

    def __init__(self, file: Path) -> None:
        self.lines: list[str] = []
        event_writer = SimpleNamespace(add_event=self.lines.append)
        self.file_writer = SimpleNamespace(event_writer=event_writer)
        self._file = file

    def add(self, line: str) -> None:
        self.file_writer.event_writer.add_event(line)

    def add_scalar(self, tag: str, value: float, iteration: int) -> None:
        self.add(f"{tag} {value} {iteration}")

    def flush(self) -> None:
        self._file.write_text("".join(f"{line}\n" for line in self.lines))


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
    """Of the last role, with a writer of the test's own."""

    def __init__(self, run_directory: Path, name: str = "first") -> None:
        super().__init__(run_directory)
        self.file = run_directory / name
        self.writer = Writer(self.file)
        self.opened = 0

    def _is_last(self) -> bool:
        return True

    def _open_writers(self) -> None:
        self.opened += 1
        self._writer = self.writer
        self._give(self._writer, None)


def board_of(megatron: Any) -> Any:
    return megatron._GLOBAL_TENSORBOARD_WRITER


@pytest.fixture
def book(tmp_path: Path, megatron: Any) -> Book:
    """One that begins a run."""
    found = Book(tmp_path)
    found.open(restored=False, first_iteration=1)
    assert board_of(megatron) is found.writer
    return found


def open_epoch() -> None:
    """It is."""


def closed_epoch() -> None:
    raise EpochClosed(1, "log")


def write(
    book: Book, megatron: Any, kind: str, iteration: int, check: Callable[[], None] = open_epoch
) -> None:
    """As Megatron's functions do: to the writer that is there, and to the console."""
    with book.lines(kind, iteration, check, epoch=1):
        writer = board_of(megatron)
        if writer is not None:
            writer.add(f"{kind} {iteration}")
        print(f"{kind} {iteration}")


@pytest.mark.parametrize("came_to", ["nothing", "done"])
def test_an_adopter_goes_on_where_the_other_has_stopped(
    book: Book, tmp_path: Path, megatron: Any, came_to: str
) -> None:
    """The state is that of before the evaluation of iteration 7."""
    dead = book
    write(dead, megatron, "log", 7)
    if came_to == "done":
        write(dead, megatron, "evaluation", 7)
    book = Book(tmp_path, "second")
    book.open(restored=True, first_iteration=7)
    for kind, iteration in (("log", 6), ("log", 7), ("evaluation", 7), ("log", 8)):
        write(book, megatron, kind, iteration)
    written = (dead.file.read_text() + book.file.read_text()).split("\n")[:-1]
    assert written == ["log 7", "evaluation 7", "log 8"]
    book.open(restored=True, first_iteration=9)  # a later epoch of the same process
    assert book.opened == 1


def test_an_adopter_of_somebody_who_left_no_note(tmp_path: Path, megatron: Any) -> None:
    (tmp_path / "lines-written.json").write_text("{")
    book = Book(tmp_path)
    book.open(restored=True, first_iteration=7)
    write(book, megatron, "log", 6)  # is in the other one's file
    write(book, megatron, "log", 7)
    assert book.writer.lines == ["log 7"]
    assert json.loads((tmp_path / "lines-written.json").read_text())["written"]["log"] == 7


def test_writers_are_back_after_a_silence(book: Book, megatron: Any) -> None:
    megatron._GLOBAL_WANDB_WRITER = wandb = object()

    def writers() -> tuple[object, object]:
        return board_of(megatron), vars(megatron)["_GLOBAL_WANDB_WRITER"]

    with book.silence():
        assert writers() == (None, None)
    assert writers() == (book.writer, wandb)
    with pytest.raises(EpochClosed), book.silence():
        closed_epoch()
    assert writers() == (book.writer, wandb)


@pytest.mark.parametrize(
    ("said", "run_id", "resume"),
    [
        ({}, "deadpool-r1", "allow"),
        ({"WANDB_RUN_ID": "mine"}, "mine", "allow"),
        ({"WANDB_RESUME": "never"}, None, "never"),
    ],
)
def test_all_processes_of_a_run_go_on_with_one_run(
    said: dict[str, str], run_id: str | None, resume: str
) -> None:
    environment = {"DEADPOOL_RUN_ID": "r1", **said}
    name_run(environment)
    assert environment.get("WANDB_RUN_ID") == run_id
    assert environment["WANDB_RESUME"] == resume
