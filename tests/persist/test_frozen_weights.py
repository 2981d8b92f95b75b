"""Large frozen weights: a file of several writers, and whole runs; see also calls/frozen.txt."""

import threading
import time
from pathlib import Path

import pytest
import torch

from deadpool_megatron.state import frozen_file
from tests.faults.harness import jobs
from tests.faults.harness.jobs import Program, assert_unnoticed, fault, run_program, undisturbed
from tests.trainer.layouts import BF16, PP2

FROZEN_TRAINER = str(Path(__file__).parent / "harness" / "frozen_trainer.py")


def never(seconds: float) -> None:
    """Wait as a writer that no close interrupts."""
    time.sleep(seconds)


def name_of(tensors: frozen_file.NamedTensors) -> str:
    return frozen_file.name_of(tensors, never)


def weights(seed: int = 1) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("0.base", torch.randn(5, 7, generator=generator)),
        ("0.none", torch.empty(0)),
        ("0.half", torch.randn(3, generator=generator).bfloat16()),
        ("1.turned", torch.randn(4, 2, generator=generator).t()),
    ]


class Held:
    """A writer's wait that the test holds."""

    def __init__(self) -> None:
        self.is_held, self.released = threading.Event(), threading.Event()

    def __call__(self, seconds: float) -> None:
        self.is_held.set()
        assert self.released.wait(30)
        time.sleep(seconds)


def writer(folder: Path, name: str, wait: frozen_file.Wait) -> threading.Thread:
    thread = threading.Thread(
        target=frozen_file.write, args=(folder, name, weights(), wait), daemon=True
    )
    thread.start()
    return thread


def test_roles_with_equal_weights_write_one_file(tmp_path):
    """The first role writes, the others wait for it."""
    name = name_of(weights())
    first, second = Held(), Held()
    writing = writer(tmp_path, name, first)
    assert first.is_held.wait(30)
    waiting = writer(tmp_path, name, second)
    assert second.is_held.wait(30)
    claim, half = sorted(path.name for path in tmp_path.iterdir())
    assert claim == f".{name}"
    assert half.startswith(f"{claim}.")
    first.released.set()
    writing.join(30)
    second.released.set()
    waiting.join(30)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_writer_replaces_the_files_of_a_dead_writer(tmp_path, monkeypatch):
    """Also a final file that was cut."""
    monkeypatch.setattr(frozen_file, "_GRACE_SECONDS", 0.2)
    name = name_of(weights())
    (tmp_path / f".{name}").write_bytes(b".")
    (tmp_path / f".{name}.0123abcd").write_bytes(b"half of it")
    (tmp_path / name).write_bytes(b"half of it")
    frozen_file.write(tmp_path, name, weights(), never)
    frozen_file.read(tmp_path, name, weights(2), never)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def frozen_program(held: str = "") -> Program:
    """Two stages, each on two data-parallel peers."""
    flags = f"{jobs.MODEL} {PP2} {BF16} --train-iters 10"
    return Program((FROZEN_TRAINER, held, *flags.split()), 4, 1)


@pytest.mark.full
@pytest.mark.slow
def test_lost_roles_get_frozen_weights_back(tmp_path):
    """A node whose peer lives, and later a restarted process."""
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
def test_state_is_kept_without_the_frozen_file(tmp_path):
    """The generation is intact, so it is kept; the run ends with the reason."""
    run, go = tmp_path / "run", tmp_path / "go"

    def remove_files() -> None:
        (run / "frozen").rename(tmp_path / "away")
        go.touch()

    plan = [fault("lost", "forward", when_role=0, when_iteration=5, target="node")]
    program = frozen_program(held=f"4={go}")
    ended = run_program(run, program, plan, spares=1, when_stepping=(3, remove_files))
    assert ended.status == 1
    assert "frozen weights cannot be read" in ended.output
    assert [event.data["generation"] for event in ended.of_kind("dumped")] == [[1, 3]]
    (tmp_path / "away").rename(run / "frozen")
    # In the first epoch of the new run: the second epoch then restores from memory.
    plan = [fault("again", "recovery.verify", when_role=2, target="node")]
    resume = ("--resume", str(run))
    resumed = run_program(tmp_path / "resumed", program, plan, spares=1, arguments=resume)
    assert_unnoticed(resumed, undisturbed(frozen_program()), plan)
    assert resumed.final["steps"][0]["iteration"] > 2, "it did not start from the beginning"
    names = [
        {path.name for path in (place / "frozen").iterdir()}
        for place in (run, tmp_path / "resumed")
    ]
    assert names[0] == names[1], "the new run has files of its own"
