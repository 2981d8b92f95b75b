"""A protected training at three sizes on four nodes and a spare, with an optional fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common import trainings
from common.machine import ROOT
from common.trainings import WARM_UP, BenchError, Measured
from deadpool_megatron.cli.run_result import ResultError, RunResult, read_result
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, segment_root
from deadpool_megatron.observe.steps import Step
from deadpool_megatron.trainer.config import TrainerConfig, parse_args

NODES = 4
# Unmeasured steps before and after the interrupted step.
BEFORE, AFTER = 2, 4
UNMEASURED = BEFORE + AFTER
# The configuration file and what is changed in it: hidden size, layers.
SIZES = {"5M": (256, 6), "20M": (512, 6), "50M": (832, 6)}
TOKENS = 2048


@dataclass
class Protected:
    """A protected run: its measured steps, what it stored, how it ended."""

    measured: Measured
    own_bytes: int = 0
    kept_bytes: int = 0
    steps: Sequence[Step] = ()
    result: RunResult | None = None


def sizes_of(name: str) -> TrainerConfig:
    """Return the configuration of one size."""
    return parse_args(size_flags(name))


def size_flags(name: str) -> list[str]:
    """Return the trainer's flags for a model of this size."""
    hidden, layers = SIZES[name]
    heads = str(hidden // 64)
    return [
        f"@{ROOT / 'configs' / '20m.args'}",
        *("--hidden-size", str(hidden), "--num-layers", str(layers)),
        *("--num-attention-heads", heads, "--lr-warmup-iters", "1"),
    ]


def training_arguments(name: str, iterations: int) -> list[str]:
    """Return the trainer's flags, the same with and without protection."""
    return [
        *(*size_flags(name), "--log-interval", "1"),
        *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--global-batch-size", str(TOKENS // sizes_of(name).seq_length)),
        *("--micro-batch-size", "2", "--train-iters", str(iterations)),
    ]


def iterations(steps: int) -> int:
    """Return the steps of a whole run, of which ``steps`` are measured."""
    return WARM_UP + 1 + steps + UNMEASURED


def strike(steps: int, victim: str) -> dict[str, object]:
    """Return the fault of a struck run: ``victim`` of role 1 is killed in a backward pass."""
    return {
        "id": "strike",
        "point": "backward",
        "match": {"role": 1, "iteration": iterations(steps) - AFTER},
        "target": victim,
    }


def run_protected(
    name: str,
    flags: Sequence[str],
    steps: int,
    base: Path,
    victim: str = "",
    training: Sequence[str] = (),
) -> Protected:
    """Run the training under ``deadpool run``. ``victim``: ``node`` or ``self`` (the process) of
    role 1 is killed after the measured steps. ``training``: further flags of the trainer.
    """
    run = Protected(Measured())

    def look(directory: Path, reported: Sequence[int]) -> None:
        if not run.own_bytes and any(iteration > WARM_UP for iteration in reported):
            run.own_bytes, run.kept_bytes = segment_bytes(directory)

    run.measured = trainings.run_protected(
        [*training_arguments(name, iterations(steps)), *training],
        steps,
        base,
        NODES,
        1,
        ("--spares", "1", *flags),
        faults=[strike(steps, victim)] if victim else [],
        unmeasured_steps=UNMEASURED,
        look=look,
    )
    directory = run.measured.directory
    assert directory is not None
    try:
        run.result = read_result(directory)
        run.steps = list(run.result.story.steps)
    except ResultError as error:
        raise BenchError(str(error)) from error
    if victim and not run.result.recoveries:
        raise BenchError(f"nothing was recovered, see {directory}")
    return run


def segment_bytes(directory: Path) -> tuple[int, int]:
    """Return the memory of all nodes' segments: that of the members' own slots, and the rest."""
    found: Counter[bool] = Counter()
    for path in segment_root(RunDirectory(directory).read_run().run_id).glob("*/*.seg"):
        with suppress(FileNotFoundError):
            found[path.name.startswith("own-")] += path.stat().st_blocks * 512
    return found[True], found[False]
