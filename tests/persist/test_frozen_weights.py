"""Large frozen weights: written once, named by each generation, read by who takes a role."""

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deadpool_megatron.megatron import loop_extras as extras
from deadpool_megatron.member import frozen_weights
from deadpool_megatron.member.frozen_weights import FrozenWeights
from deadpool_megatron.state import frozen_file
from deadpool_megatron.state.frozen_file import FrozenFileError
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.vault.errors import OutOfSpace
from tests.faults.harness import jobs
from tests.faults.harness.jobs import Program, assert_unnoticed, fault, run_program, undisturbed
from tests.trainer.layouts import BF16, PP2

FROZEN_TRAINER = str(Path(__file__).parent / "harness" / "frozen_trainer.py")


def never(seconds: float) -> None:
    """Nothing stops the writer."""
    time.sleep(seconds)


def name_of(tensors: frozen_file.Named) -> str:
    return frozen_file.name_of(tensors, never)


def weights(seed: int = 1) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("0.base", torch.randn(5, 7, generator=generator)),
        ("0.none", torch.empty(0)),
        ("0.half", torch.randn(3, generator=generator).bfloat16()),
        ("1.turned", torch.randn(4, 2, generator=generator).t()),
    ]


def program_of(model: torch.nn.Module) -> Any:
    return cast(Any, SimpleNamespace(model_chunks=[model]))


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(frozen_weights, "MAX_FROZEN_BYTES", 64)
    made = torch.nn.Linear(8, 8)
    made.weight.requires_grad_(False)
    return made


def test_what_was_written_is_read(tmp_path):
    wanted, found = weights(), weights(2)
    name = name_of(wanted)
    frozen_file.write(tmp_path, name, wanted, never)
    frozen_file.read(tmp_path, name, found, never)
    for (_, one), (_, other) in zip(wanted, found, strict=True):
        assert torch.equal(one, other)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_mode & 0o77 == 0, "nobody else reads weights"
    assert len(frozen_file.mapped(tmp_path, name)) == sum(tensor.nbytes for _, tensor in wanted)


@pytest.mark.parametrize("how", ["gone", "shorter", "longer", "damaged", "a link", "others' names"])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, how):
    wanted = weights()
    name = name_of(wanted)
    frozen_file.write(tmp_path, name, wanted, never)
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "shorter":
        path.write_bytes(content[:-1])
    elif how == "longer":
        path.write_bytes(content + b"0")
    elif how == "damaged":
        content[3] ^= 1
        path.write_bytes(content)
    elif how == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        wanted[0] = ("0.other", wanted[0][1])
    with pytest.raises(FrozenFileError) as error:
        frozen_file.read(tmp_path, name, wanted, never)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    if how != "others' names":
        with pytest.raises(FrozenFileError):
            frozen_file.mapped(tmp_path, name)


class Held:
    """Waits as a writer does, and is held the first time."""

    def __init__(self) -> None:
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, seconds: float) -> None:
        self.is_held.set()
        assert self.may_go_on.wait(30)
        time.sleep(seconds)


def writer(folder: Path, name: str, wait: frozen_file.Wait) -> threading.Thread:
    thread = threading.Thread(
        target=frozen_file.write, args=(folder, name, weights(), wait), daemon=True
    )
    thread.start()
    return thread


def test_roles_with_equal_weights_write_one_file(tmp_path):
    """One writes, the others wait for it, whoever was first."""
    name = name_of(weights())
    first, second = Held(), Held()
    writing = writer(tmp_path, name, first)
    assert first.is_held.wait(30)
    waiting = writer(tmp_path, name, second)
    assert second.is_held.wait(30)
    claim, half = sorted(path.name for path in tmp_path.iterdir())
    assert claim == f".{name}"
    assert half.startswith(f"{claim}.")
    first.may_go_on.set()
    writing.join(30)
    second.may_go_on.set()
    waiting.join(30)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_writer_that_died_is_not_waited_for(tmp_path, monkeypatch):
    """Nor is anything of it left, not even a file that was cut."""
    monkeypatch.setattr(frozen_file, "_GRACE_SECONDS", 0.2)
    name = name_of(weights())
    (tmp_path / f".{name}").write_bytes(b".")
    (tmp_path / f".{name}.0123abcd").write_bytes(b"half of it")
    (tmp_path / name).write_bytes(b"half of it")
    frozen_file.write(tmp_path, name, weights(), never)
    frozen_file.read(tmp_path, name, weights(2), never)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_without_room_the_run_ends_with_one_line(tmp_path, model, monkeypatch):
    def is_full(descriptor: int) -> None:
        del descriptor
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(frozen_file.os, "fsync", is_full)
    frozen = FrozenWeights(extras.large_frozen_weights(program_of(model)), tmp_path / "frozen")
    with pytest.raises(
        OutOfSpace, match=r"256 bytes .* No space left on device; make room"
    ) as error:
        frozen.write(never)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "frozen").iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_a_new_run_has_the_files_of_the_one_it_goes_on_from(tmp_path, monkeypatch, *, links):
    def other_file_system(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    old, new = tmp_path / "old", tmp_path / "new"
    name = name_of(weights())
    frozen_file.write(old, name, weights(), never)
    (old / f".{name}.0123abcd").write_bytes(b"half of it")
    if not links:
        monkeypatch.setattr(frozen_file.os, "link", other_file_system)
    assert frozen_file.copy_files(old, new) == (0 if links else (old / name).stat().st_size)
    assert frozen_file.copy_files(old, new) == 0, "it is there"
    (old / name).unlink()
    frozen_file.read(new, name, weights(2), never)
    assert [(path.name, path.stat().st_mode & 0o77) for path in new.iterdir()] == [(name, 0)]
    assert frozen_file.copy_files(tmp_path / "none", tmp_path / "nothing") == 0
    assert not (tmp_path / "nothing").exists()


def test_a_process_that_has_them_reads_nothing(tmp_path, model):
    frozen = FrozenWeights(extras.large_frozen_weights(program_of(model)), tmp_path)
    assert not frozen.name()
    frozen.write(never)
    path = tmp_path / frozen.name()
    path.rename(tmp_path / "away")
    frozen.restore(path.name, never)
    frozen.forget()  # a checkpoint comes, and then another loss
    with torch.no_grad():
        model.weight[0, 0] += 1
    with pytest.raises(FrozenFileError):
        frozen.restore(path.name, never)
    (tmp_path / "away").rename(path)
    frozen.restore(path.name, never)
    assert frozen.name() == path.name == name_of([("0.weight", model.weight)])
    with pytest.raises(FrozenFileError, match="without its frozen weights"):
        frozen.restore("", never)


def test_a_program_that_changes_them_is_refused(tmp_path, model):
    """A teacher that follows its pupil is such a program. Weights that are written anew with what
    they hold have not changed."""
    frozen = FrozenWeights(extras.large_frozen_weights(program_of(model)), tmp_path)
    frozen.write(never)
    name = frozen.name()
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
    assert frozen.name() == name
    with torch.no_grad():
        model.weight.mul_(0.5)
    with pytest.raises(UnsupportedState, match="frozen weights have changed") as error:
        frozen.name()
    assert "\n" not in str(error.value)
    frozen.forget()
    assert not frozen.name()
    frozen.write(never)
    name = frozen.name()
    assert name
    model.weight.data.mul_(0.5)
    assert frozen.name() == name, "torch has not counted it"
    with pytest.raises(UnsupportedState):
        frozen.restore(name, never)


def frozen_program(flags: str = "", held: str = "", nodes: int = 4) -> Program:
    """Two stages, each on two data-parallel peers."""
    command = (
        FROZEN_TRAINER,
        held,
        *jobs.MODEL.split(),
        *PP2.split(),
        *BF16.split(),
        *flags.split(),
    )
    return Program((*command, "--train-iters", "10"), nodes, 4 // nodes)


@pytest.mark.full
@pytest.mark.slow
def test_lost_roles_get_them_back(tmp_path):
    """A node whose peer lives, and later a process that is started again."""
    plan = [
        fault("spare", "backward", when_role=0, when_iteration=4, target="node"),
        fault("again", "forward", when_role=3, nth=2, after="spare"),
    ]
    program, run = frozen_program(), tmp_path / "run"
    outcome = run_program(run, program, plan, spares=2, refill=2)
    assert_unnoticed(outcome, undisturbed(program), plan)
    assert len(list((run / "frozen").iterdir())) == 2, "one for each stage"


@pytest.mark.slow
@pytest.mark.full
def test_without_the_file_the_state_is_kept(tmp_path):
    """The generation is as it should be, so nobody throws it away; the run ends and says why."""
    run, go = tmp_path / "run", tmp_path / "go"

    def take_them_away() -> None:
        (run / "frozen").rename(tmp_path / "away")
        go.touch()

    plan = [fault("lost", "forward", when_role=0, when_iteration=5, target="node")]
    program = frozen_program(held=f"4={go}")
    ended = run_program(run, program, plan, spares=1, when_stepping=(3, take_them_away))
    assert ended.status == 1
    assert "frozen weights cannot be read" in ended.output
    assert [event.data["generation"] for event in ended.of_kind("dumped")] == [[1, 3]]
    (tmp_path / "away").rename(run / "frozen")
    # In the first epoch of the new run: what the second one restores is in memory by then.
    plan = [fault("again", "recovery.verify", when_role=2, target="node")]
    resume = ("--resume", str(run))
    resumed = run_program(tmp_path / "resumed", program, plan, spares=1, arguments=resume)
    assert_unnoticed(resumed, undisturbed(frozen_program()), plan)
    assert resumed.final["steps"][0]["iteration"] > 2, "it did not start anew"
    names = [
        {path.name for path in (place / "frozen").iterdir()}
        for place in (run, tmp_path / "resumed")
    ]
    assert names[0] == names[1], "the new run has files of its own"
