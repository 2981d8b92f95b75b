"""One training at three sizes on four nodes and a spare, protected, and struck where asked to."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.machine import ROOT
from common.trainings import WARM_UP, BenchError, Measured, watch
from deadpool_megatron.cli.show.numbers import TimedStep
from deadpool_megatron.cli.show.report import read_story
from deadpool_megatron.cli.show.run_result import ResultError, RunResult, read_result
from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, segment_root
from deadpool_megatron.events import Kind
from deadpool_megatron.failpoints import ENVIRONMENT_NAME as FAULTS_VARIABLE
from deadpool_megatron.trainer.arguments import TrainerConfig, parse_args

NODES = 4
# Unmeasured steps before and after the one that is interrupted.
BEFORE, AFTER = 2, 4
# The configuration file and what is changed in it: hidden size, layers.
SIZES = {"5M": (256, 6), "20M": (512, 6), "50M": (832, 6)}
TOKENS = 2048


@dataclass
class Protected:
    """A protected run: its measured steps, what it stored, how it ended."""

    measured: Measured
    own_bytes: int = 0
    kept_bytes: int = 0
    steps: Sequence[TimedStep] = ()
    result: RunResult | None = None


def sizes_of(name: str) -> TrainerConfig:
    """The configuration of one size."""
    return parse_args(size_flags(name))


def size_flags(name: str) -> list[str]:
    """Flags of the trainer that make a model of this size."""
    hidden, layers = SIZES[name]
    heads = str(hidden // 64)
    return [
        f"@{ROOT / 'configs' / '20m.args'}",
        *("--hidden-size", str(hidden), "--num-layers", str(layers)),
        *("--num-attention-heads", heads, "--lr-warmup-iters", "1"),
    ]


def training_arguments(name: str, iterations: int) -> list[str]:
    """Flags of the trainer, the same with and without protection."""
    return [
        *(*size_flags(name), "--log-interval", "1"),
        *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--global-batch-size", str(TOKENS // sizes_of(name).seq_length)),
        *("--micro-batch-size", "2", "--train-iters", str(iterations)),
    ]


def run_protected(
    name: str,
    flags: Sequence[str],
    steps: int,
    base: Path,
    victim: str = "",
    training: Sequence[str] = (),
) -> Protected:
    """The training under ``deadpool run``. ``victim``: ``node`` or ``self`` (the process) of role
    1 is killed after what is measured. ``training``: further flags of the trainer.
    """
    directory = base / uuid.uuid4().hex
    struck_iteration = WARM_UP + 1 + steps + BEFORE
    fault = {
        "id": "strike",
        "point": "backward",
        "match": {"role": 1, "iteration": struck_iteration},
        "action": "signal",
        "target": victim,
        "signal": "KILL",
    }
    plan = directory.with_suffix(".faults.json")
    plan.write_text(json.dumps([fault] if victim else []))
    command = [
        *(sys.executable, "-m", "deadpool_megatron", "run"),
        *("--nodes", str(NODES), "--spares", "1", "--nproc-per-node", "1"),
        # A cadence that follows the measured waits would change what is measured.
        *("--run-dir", str(directory), "--deadpool-cadence", "1", *flags),
        *("--", "-m", "deadpool_megatron.trainer"),
        *training_arguments(name, struck_iteration + AFTER),
        *training,
    ]
    tail = EventTail(RunDirectory(directory).events)
    run = Protected(Measured())

    def new_steps() -> int:
        iterations = [event.iteration for event in tail.poll() if event.kind is Kind.STEP]
        if not run.own_bytes and any((iteration or 0) > WARM_UP for iteration in iterations):
            run.own_bytes, run.kept_bytes = segment_bytes(directory)
        return len(iterations)

    log = directory.with_suffix(".log")
    variables = {FAULTS_VARIABLE: str(plan)}
    run.measured = watch(command, log, steps, new_steps, variables, unmeasured_steps=BEFORE + AFTER)
    try:
        story, run.result = read_story(directory), read_result(directory)
    except ResultError as error:
        raise BenchError(str(error)) from error
    run.steps = story.steps[:]
    measured = range(WARM_UP + 1, WARM_UP + 1 + steps)
    waits = [s for (_, iteration), s in story.gate_waits.items() if iteration in measured]
    run.measured.gate_waits, run.measured.gate_seconds = len(waits), sum(waits)
    # Of the whole run: generation 0 and, where a node was lost, what was protected anew.
    shipped = story.bytes_by_kind.get(Kind.COMMITTED, 0)
    run.measured.shipped_bytes_per_step = shipped / (struck_iteration + AFTER + 1)
    if victim and not run.result.recoveries:
        raise BenchError(f"nothing was recovered, see {directory}")
    return run


def segment_bytes(directory: Path) -> tuple[int, int]:
    """Memory behind the segments of all nodes: of the members' own slots, and of all others."""
    own = others = 0
    for path in segment_root(RunDirectory(directory).read_run().run_id).glob("*/*.seg"):
        try:
            allocated = path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
        if path.name.startswith("own-"):
            own += allocated
        else:
            others += allocated
    return own, others
