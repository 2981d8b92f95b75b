"""A training run as a bench sees it: the time of each step, and the resources used meanwhile."""

from __future__ import annotations

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
from statistics import fmean
from typing import Any

from common.figures import Row, row
from common.frame import BenchError
from common.machine import memory_bytes, own_seconds, thread_seconds
from common.outcomes import StepReport
from common.termination import MARK, marked_processes, stop
from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import ResultError, RunResult, read_result
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import EventTail, Kind
from deadpool_megatron.failpoints import ENVIRONMENT_NAME as FAULTS_VARIABLE
from deadpool_megatron.trainer.config import TrainerConfig

#: Steps at the start of a run that are not measured.
WARM_UP = 3
# Short compared with a step, long compared with the cost of a poll.
_POLL_SECONDS = 0.01
_SILENCE_SECONDS = 300.0
# For the end of a run whose steps have all been reported, or that is stopped.
_STOP_SECONDS = 60.0
_MIN_SHOWN_SECONDS = 0.001
NewSteps = Callable[[], int]


@dataclass
class Measured:
    """One run: seconds of each measured step, and the resources used during them; ``memory_bytes``:
    the most in the first steps. ``killed_at``: the wall clock at its fault; ``hashes``: those of
    final states; ``recomputed``: the steps computed again, None where such steps are reported
    again."""

    step_seconds: list[float] = field(default_factory=list)
    thread_seconds_per_step: Counter[str] = field(default_factory=Counter)
    memory_bytes: int = 0
    gate_seconds: float | None = None
    shipped_bytes_per_step: float | None = None
    result: RunResult | None = None
    killed_at: float | None = None
    reports: list[StepReport] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    recomputed: float | None = None

    @property
    def cpu_seconds_per_step(self) -> float:
        """The processor time of a step, of all processes."""
        return sum(self.thread_seconds_per_step.values())

    @property
    def own_seconds_per_step(self) -> float:
        """The processor time of a step in the threads that protection adds."""
        return own_seconds(self.thread_seconds_per_step)

    @property
    def mean_seconds(self) -> float:
        """The mean time of a step."""
        return fmean(self.step_seconds)


class Watch:
    """Looks at the processes with a mark as the steps of a run are reported."""

    def __init__(self, steps: int, mark: str) -> None:
        self.measured = Measured()
        self._steps, self._mark = steps, mark
        self._times: list[float] = []
        self._before: Counter[str] = Counter()

    def follow(
        self,
        new_steps: NewSteps,
        is_over: Callable[[], bool],
        output: Callable[[], str],
        unmeasured_steps: int = 0,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> Measured:
        """Watch until the run is over; ``new_steps`` returns the number of steps reported since its
        last call. Raises BenchError, with the end of ``output``, if it ends with fewer steps than
        it should, reports nothing for ``silence_seconds`` or does not end after its last step.
        """
        expected = WARM_UP + 1 + self._steps + unmeasured_steps
        last, over = time.perf_counter(), False
        while not over and time.perf_counter() - last < silence_seconds:
            # Look at the end first: the last reports before it are then read below.
            over = is_over()
            for _ in range(new_steps()):
                last = time.perf_counter()
                self._take(last)
            if len(self._times) >= expected:
                silence_seconds = _STOP_SECONDS
            if 0 < len(self._times) <= WARM_UP:
                found = max(self.measured.memory_bytes, memory_bytes(self._mark))
                self.measured.memory_bytes = found
            time.sleep(_POLL_SECONDS)
        if not over or len(self._times) < expected:
            silence = "" if over else f"no step for {silence_seconds:.0f} s, stopped: "
            end = "\n".join(output().splitlines()[-10:])
            raise BenchError(f"{silence}saw {len(self._times)} steps of {expected}:\n{end}")
        # The step after the warm-up is not measured: memory was read while it ran.
        measured = self._times[WARM_UP : WARM_UP + 1 + self._steps]
        self.measured.step_seconds = [b - a for a, b in itertools.pairwise(measured)]
        return self.measured

    def _take(self, now: float) -> None:
        self._times.append(now)
        if len(self._times) == WARM_UP:
            self._before = thread_seconds(self._mark)
        elif len(self._times) == WARM_UP + 1 + self._steps:
            threads = thread_seconds(self._mark) - self._before
            self.measured.thread_seconds_per_step = Counter(
                {name: seconds / (self._steps + 1) for name, seconds in threads.items()}
            )


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
    command: Sequence[str] = (),
) -> Measured:
    """Run the training, or ``command``, on stock gloo, without protection. It prints a line per
    step."""
    program = Path(__file__).with_name("plain_ranks.py")
    command = command or [sys.executable, str(program), str(ranks), *training]
    log = base / f"{uuid.uuid4().hex}.log"
    log.touch()
    with open(log) as lines:

        def new_steps() -> int:
            return sum("iteration " in line and " loss" in line for line in lines)

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
    look: Callable[[Path, Sequence[int]], object] = lambda directory, iterations: None,
) -> Measured:
    """Run the training under ``deadpool run`` with these flags; its events report each step.
    ``look(directory, iterations)``: called with the iterations reported since its last call."""
    directory = base / uuid.uuid4().hex
    variables = dict(variables or {})
    plan = directory.with_suffix(".faults.json")
    if faults:
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
    read_run(measured, directory, steps, unmeasured_steps)
    if faults:
        measured.killed_at = struck_at(plan)
    return measured


def struck_at(plan: Path) -> float:
    """Return when the fault of a plan has struck, by the wall clock. Raises BenchError if not."""
    try:
        return Path(f"{plan}.fired", "strike").stat().st_mtime
    except FileNotFoundError as error:
        raise BenchError("nothing was struck") from error


def read_run(measured: Measured, directory: Path, steps: int, unmeasured_steps: int = 0) -> None:
    """Add the events of a run that has ended: its result, waits at gates, bytes sent."""
    try:
        measured.result = read_result(directory)
    except ResultError as error:
        raise BenchError(str(error)) from error
    result, story, last = measured.result, measured.result.story, WARM_UP + 1 + steps
    measured.reports = [StepReport(s.iteration, s.loss or "", s.wall_seconds) for s in story.steps]
    measured.hashes = [result.roles[role].sha256 for role in sorted(result.roles)]
    measured.recomputed = sum(each.steps_recomputed for each in result.recoveries)
    waits = [s for (_, at), s in story.gate_waits.items() if WARM_UP < (at or 0) <= last]
    measured.gate_seconds = sum(waits)
    # Generation 0, after the build, is shipped as well, and after the loss of a node the copies
    # that were made again.
    shipped = story.bytes_by_kind.get(Kind.COMMITTED, 0)
    measured.shipped_bytes_per_step = shipped / (last + unmeasured_steps + 1)


def watch(
    command: Sequence[str],
    log: Path,
    steps: int,
    new_steps: NewSteps,
    variables: Mapping[str, str] | None = None,
    unmeasured_steps: int = 0,
    silence_seconds: float = _SILENCE_SECONDS,
) -> Measured:
    """Run a command to its end: see :meth:`Watch.follow`. Raises BenchError if it fails."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        environment |= variables or {}
        child = subprocess.Popen(command, env=environment, start_new_session=True, **files)

    def text() -> str:
        return f"exit status {child.poll()}\n{log.read_text(errors='replace')}"

    try:
        watched = Watch(steps, mark)
        found = watched.follow(
            *(new_steps, lambda: child.poll() is not None, text, unmeasured_steps, silence_seconds)
        )
    finally:
        stop(child, _STOP_SECONDS)
        end_marked(mark)
    if child.returncode:
        raise BenchError(text()[-2000:])
    return found


def end_marked(mark: str, seconds: float = 10.0) -> None:
    """Give all processes of a run a moment to end, then kill them, those of other sessions too."""
    for pid in posix.wait_until_ended(list(marked_processes(mark)), seconds):
        posix.kill(pid)


def row_of(
    name: str,
    runs: Sequence[Measured],
    plain: Sequence[Measured] = (),
    at: float | None = None,
    **more: Sequence[float],
) -> Row:
    """Return the row of a side. ``plain``: the runs without protection, of the same rounds. All
    processor time of another system that such a run has not used is taken as its own."""
    pairs = [*zip(plain or runs, runs, strict=True)]
    every = {
        "own_cpu_seconds_per_step": [
            b.own_seconds_per_step or b.cpu_seconds_per_step - a.cpu_seconds_per_step
            for a, b in pairs
        ],
        "cpu_seconds_per_step": [run.cpu_seconds_per_step for run in runs],
        "step_seconds": [seconds for run in runs for seconds in run.step_seconds],
        "gate_seconds": [run.gate_seconds for run in runs if run.gate_seconds is not None],
        "memory_bytes": [float(run.memory_bytes) for run in runs],
        **more,
    }
    ratios = [b.mean_seconds / a.mean_seconds for a, b in pairs]
    found = row(name, every, {"step_over_plain": ratios if plain else ()}, at)
    total = sum((run.thread_seconds_per_step for run in runs), Counter[str]())
    threads = {name: seconds / len(runs) for name, seconds in total.most_common()}
    shipped = [run.shipped_bytes_per_step or 0.0 for run in runs]
    return found | {
        "thread_seconds_per_step": {n: s for n, s in threads.items() if s >= _MIN_SHOWN_SECONDS},
        "shipped_bytes_per_step": fmean(shipped),
        "runs": [run.step_seconds for run in runs],
    }


def is_identical(first: Measured, second: Measured) -> bool:
    """Return whether two protected runs have computed the same, bit by bit."""
    assert first.result is not None
    assert second.result is not None
    return compare_results(first.result, second.result).identical
