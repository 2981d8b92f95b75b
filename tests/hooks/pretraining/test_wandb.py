"""The real W&B, offline: what a killed process had not written is in the file of its successor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.hooks.pretraining.iterations import wandb_rows
from deadpool_megatron.hooks.pretraining.iterations.wandb_rows import WandbRows, name_run

# A process of the last role, which trains from one iteration to another in an epoch.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import wandb
from deadpool_megatron.hooks.pretraining.iterations.logbook import Logbook

run, (epoch, first, last), how = Path(sys.argv[1]), map(int, sys.argv[2:5]), sys.argv[5]
training = ModuleType("megatron.training")
names = training.global_vars = SimpleNamespace(
    _GLOBAL_TENSORBOARD_WRITER=None, _GLOBAL_WANDB_WRITER=None
)
training.get_args = lambda: SimpleNamespace(tensorboard_dir=None)
sys.modules["megatron.training"] = training

def set_writer(args):
    wandb.init(dir=run, name="test", project="test", config={})
    names._GLOBAL_WANDB_WRITER = wandb

names._set_wandb_writer = set_writer

class Book(Logbook):
    def _is_last(self):
        return True

book = Book(run)
book.open(restored=epoch > 1, first_iteration=first)
book.mute()
for iteration in range(first, last + 1):
    with book.lines("log", iteration, lambda: None, epoch):
        if (writer := names._GLOBAL_WANDB_WRITER) is not None:
            writer.log({"loss": 1 / iteration}, iteration)
            writer.log({"samples": 8 * iteration}, iteration)
        book.mark(epoch, 3 * (epoch > 1), iteration, shown=True)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
book.close()
os._exit(0)  # as a member does
"""


def play(run: Path, epoch: int, first: int, last: int, how: str) -> int:
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "DEADPOOL_RUN_ID": "r1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-c", PROGRAM, str(run), str(epoch), str(first), str(last), how]
    return subprocess.run(command, env=kept | quiet, check=False, timeout=240).returncode


def records(file: Path) -> Iterator[bytes]:
    """The records of W&B's file: a log of LevelDB behind seven bytes."""
    data, at, block, begun = file.read_bytes(), 7, 1 << 15, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield begun
            begun = b""


def rows(file: Path) -> list[tuple[int, dict[str, Any]]]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for raw in records(file):
        record = wandb_internal_pb2.Record.FromString(raw)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items}
            found.append((int(row["_step"]), row))
    return found


@pytest.mark.full
@pytest.mark.slow
def test_what_a_killed_process_had_logged_is_logged_by_its_successor(tmp_path: Path) -> None:
    """Both go on with one run of W&B, and each has each point once."""
    pytest.importorskip("wandb")
    assert play(tmp_path, 1, 1, 40, "killed") == -signal.SIGKILL
    assert play(tmp_path, 2, 38, 50, "ended") == 0
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {"run-deadpool-r1.wandb"}
    found = rows(files[-1])
    assert [step for step, _ in found] == list(range(1, 51))
    for step, row in found:
        assert (row["loss"], row["samples"]) == (1 / step, 8 * step)
    tag = "deadpool/iterations_recomputed"
    marked = {step: row[tag] for step, row in found if tag in row}
    assert marked == {41: 3}
    assert [row["deadpool/epoch"] for _, row in found] == [1] * 40 + [2] * 10
    assert all(row.get("deadpool/recovery_seconds", 0) >= 0 for _, row in found)


class FakeWandb:
    def __init__(self, starting_step: int = 0) -> None:
        self.run = self
        self.starting_step = starting_step
        self.logged: list[Any] = []

    def log(self, values: Any, step: int) -> None:
        self.logged.append((step, values))


def test_with_a_server_only_what_it_lacks_is_logged_again(tmp_path: Path) -> None:
    WandbRows(tmp_path).keep([({"a": 1, "picture": object()}, 1), ({"b": 2}, 1), ({"a": 3}, 2)])
    wandb = FakeWandb(starting_step=2)
    WandbRows(tmp_path).log_again(wandb)
    assert wandb.logged == [(2, {"a": 3})]


def test_the_newest_rows_are_kept_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_rows, "MOST_ROWS", 10)
    kept = WandbRows(tmp_path)
    for step in range(1, 96):
        kept.keep([({"a": step}, step)])
    (file,) = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) <= 20
    with file.open("a") as torn:
        torn.write('[[96, {"a"')
    wandb, later = FakeWandb(), WandbRows(tmp_path)
    later.log_again(wandb)
    later.keep([({"a": 96}, 96)])
    assert [step for step, _ in wandb.logged] == list(range(86, 96))
    assert file.read_text().splitlines()[-1] == '[[96, {"a": 96}]]'


def test_a_run_that_begins_anew_logs_nothing_of_before(tmp_path: Path) -> None:
    WandbRows(tmp_path).keep([({"a": 1}, 1)])
    WandbRows(tmp_path).begin()
    wandb = FakeWandb()
    WandbRows(tmp_path).log_again(wandb)
    assert not wandb.logged


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
