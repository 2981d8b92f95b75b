"""A training run as a bench sees it: the time of each step, and the resources used meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.machine import MARK, cpu_seconds, memory_bytes, thread_seconds
from common.termination import orderly_termination, stop
from deadpool_megatron.cli.run_result import ResultError, read_story
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import EventTail, Kind
from deadpool_megatron.failpoints import ENVIRONMENT_NAME as FAULTS_VARIABLE
from deadpool_megatron.trainer.config import TrainerConfig

#: Steps at the start of a run that are not measured.
WARM_UP = 3
# Short compared with a step, long compared with the cost of a poll.
_POLL_SECONDS = 0.01
_SILENCE_SECONDS = 300.0
_STOP_SECONDS = 30.0


class BenchError(Exception):
    """A run failed; the message names it and shows the end of its output."""


@dataclass
class Measured:
    """One run: seconds of each measured step, and the resources used during them."""

    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds_per_step: float = 0.0
    thread_seconds_per_step: Counter[str] = field(default_factory=Counter)
    memory_bytes: int = 0
    gate_seconds: float | None = None
    gate_waits: int | None = None
    shipped_bytes_per_step: float | None = None
    directory: Path | None = None


def parameters(config: TrainerConfig) -> int:
    """Return the number of parameters; first and last stage have an embedding each."""
    hidden = config.hidden_size
    layer = 12 * hidden**2 + 13 * hidden
    embeddings = (2 * config.vocab_size + config.seq_length) * hidden
    return embeddings + config.num_layers * layer + 2 * hidden


def run_plain(
    training: Sequence[str],
    ranks: int,
    steps: int,
    base: Path,
    unmeasured_steps: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Measured:
    """Run the training on stock gloo, without protection, which prints a line per step."""
    program = Path(__file__).with_name("plain_ranks.py")
    command = [sys.executable, str(program), str(ranks), *training]
    log = base / f"{uuid.uuid4().hex}.log"
    log.touch()
    with open(log) as lines:

        def new_steps() -> int:
            return sum("iteration " in line and " | loss " in line for line in lines)

        return watch(command, log, steps, new_steps, variables, unmeasured_steps)


def run_protected(
    training: Sequence[str],
    steps: int,
    base: Path,
    nodes: int,
    nproc_per_node: int,
    flags: Sequence[str] = ("--spares", "0"),
    *,
    program: Sequence[str] = ("-m", "deadpool_megatron.trainer"),
    variables: Mapping[str, str] | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
    unmeasured_steps: int = 0,
    look: Callable[[Path, Sequence[int]], None] = lambda directory, iterations: None,
) -> Measured:
    """Run the training under ``deadpool run`` with these flags; its events report each step.
    ``look(directory, iterations)``: called with the iterations reported since its last call."""
    directory = base / uuid.uuid4().hex
    variables = dict(variables or {})
    if faults:
        plan = directory.with_suffix(".faults.json")
        plan.write_text(json.dumps(faults))
        variables[FAULTS_VARIABLE] = str(plan)
    command = [
        *(sys.executable, "-m", "deadpool_megatron", "run", "--run-dir", str(directory)),
        *("--nodes", str(nodes), "--nproc-per-node", str(nproc_per_node)),
        # A cadence that follows the measured waits would change what is measured.
        *("--deadpool-cadence", "1", *flags, "--", *program, *training),
    ]
    tail = EventTail(RunDirectory(directory).events)

    def new_steps() -> int:
        iterations = [event.iteration or 0 for event in tail.poll() if event.kind is Kind.STEP]
        look(directory, iterations)
        return len(iterations)

    log = directory.with_suffix(".log")
    measured = watch(command, log, steps, new_steps, variables, unmeasured_steps)
    measured.directory = directory
    try:
        story = read_story(directory)
    except ResultError as error:
        raise BenchError(str(error)) from error
    last = WARM_UP + 1 + steps
    waits = [s for (_, at), s in story.gate_waits.items() if WARM_UP < (at or 0) <= last]
    measured.gate_waits, measured.gate_seconds = len(waits), sum(waits)
    if Kind.COMMITTED in story.bytes_by_kind:
        # Generation 0, after the build, is shipped as well, and after the loss of a node the copies
        # that were made again.
        shipped = story.bytes_by_kind[Kind.COMMITTED]
        measured.shipped_bytes_per_step = shipped / (last + unmeasured_steps + 1)
    return measured


@orderly_termination()
def watch(
    command: list[str],
    log: Path,
    steps: int,
    new_steps: Callable[[], int],
    variables: Mapping[str, str] | None = None,
    unmeasured_steps: int = 0,
    silence_seconds: float = _SILENCE_SECONDS,
) -> Measured:
    """Run to the end; ``new_steps`` returns the number of steps reported since its last call.

    ``unmeasured_steps``: number of steps after the measured. Raises BenchError when the run
    fails, or reports nothing for ``silence_seconds``.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    environment |= variables or {}
    expected = WARM_UP + 1 + steps + unmeasured_steps
    measured = Measured()
    times: list[float] = []
    cpu_before, threads_before = 0.0, Counter[str]()
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        silent_since = time.perf_counter()
        over = False
        while not over and time.perf_counter() - silent_since < silence_seconds:
            # Poll the child first: its last reports are then read below.
            over = child.poll() is not None
            for _ in range(new_steps()):
                silent_since = time.perf_counter()
                times.append(silent_since)
                if len(times) == WARM_UP:
                    measured.memory_bytes = memory_bytes(mark)
                    cpu_before, threads_before = cpu_seconds(mark), thread_seconds(mark)
                elif len(times) == WARM_UP + 1 + steps:
                    measured.cpu_seconds_per_step = (cpu_seconds(mark) - cpu_before) / (steps + 1)
                    threads = thread_seconds(mark) - threads_before
                    measured.thread_seconds_per_step = Counter(
                        {name: seconds / (steps + 1) for name, seconds in threads.items()}
                    )
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_SECONDS)
    finally:
        stop(child, _STOP_SECONDS)
    if child.returncode != 0 or len(times) < expected:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        silence = "" if over else f"no step for {silence_seconds:.0f} s, stopped: "
        raise BenchError(
            f"{silence}exit status {child.returncode}, saw {len(times)} steps of {expected};"
            f" the end of its output:\n{end}"
        )
    # The step after the warm-up is not measured: memory was read while it ran.
    measured.step_seconds = [
        after - before for before, after in itertools.pairwise(times[WARM_UP : WARM_UP + 1 + steps])
    ]
    return measured
