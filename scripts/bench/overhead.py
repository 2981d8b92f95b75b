#!/usr/bin/env python
"""What protection costs while nothing fails: step time with it over step time without it.

    .venv/bin/python scripts/bench/overhead.py [--rounds N] [--steps N] [--out FILE]

A GPT of about 20 M parameters trains at 8,192 tokens per step and at a quarter of that, without
protection (stock gloo) and with it, in turns: A/B/A/B. Both report each step when it is done; the
time of a step is that between two reports, taken by this one observer. The first steps of a run
warm up and are not measured; of the others none is left out. Beside the ratio: seconds waited at
the commit gate, CPU seconds per step, bytes shipped per parameter and step, memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.machine import MARK, ROOT, cpu_seconds, machine_facts, memory_bytes, write_facts

from deadpool_megatron.cli.show.report import read_story
from deadpool_megatron.cli.show.results import ResultError
from deadpool_megatron.cli.show.story import summary
from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Kind
from deadpool_megatron.trainer.arguments import TrainerConfig, parse_args

CONFIG = ROOT / "configs" / "20m.args"
TOKENS_PER_STEP = (8192, 2048)
NODES, NPROC_PER_NODE = 2, 2
_WARM_UP = 3
# Short against a step, long against the cost of a look.
_POLL_SECONDS = 0.01
_SILENCE_SECONDS = 300.0
_STOP_SECONDS = 30.0


class BenchError(Exception):
    """A run failed; the message says which and shows the end of what it wrote."""


@dataclass
class Measured:
    """One run: seconds of each measured step, and what was used during them."""

    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds_per_step: float = 0.0
    memory_bytes: int = 0
    gate_seconds: float | None = None
    gate_waits: int | None = None
    shipped_bytes_per_step: float | None = None


def model() -> TrainerConfig:
    """The sizes in the configuration file."""
    return parse_args([f"@{CONFIG}", "--lr-warmup-iters", "1"])


def parameters() -> int:
    """Trained numbers; the embedding counts twice, first and last stage hold one each."""
    config = model()
    hidden = config.hidden_size
    layer = 12 * hidden**2 + 13 * hidden
    embeddings = (2 * config.vocab_size + config.seq_length) * hidden
    return embeddings + config.num_layers * layer + 2 * hidden


def training_arguments(tokens: int, steps: int) -> list[str]:
    """Flags of the trainer, the same with and without protection."""
    samples = tokens // model().seq_length
    return [
        *(f"@{CONFIG}", "--lr-warmup-iters", "1", "--log-interval", "1"),
        *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--global-batch-size", str(samples)),
        *("--train-iters", str(_WARM_UP + 1 + steps)),
    ]


def run_plain(tokens: int, steps: int, base: Path) -> Measured:
    """The same training on stock gloo, which prints a line per step."""
    program = Path(__file__).with_name("common") / "plain_ranks.py"
    command = [sys.executable, str(program), str(NODES * NPROC_PER_NODE)]
    log = base / f"{uuid.uuid4().hex}.log"
    log.touch()
    with open(log) as lines:

        def new_steps() -> int:
            return sum("iteration " in line and " | loss " in line for line in lines)

        return watch([*command, *training_arguments(tokens, steps)], log, steps, new_steps)


def run_protected(tokens: int, steps: int, base: Path) -> Measured:
    """The training under ``deadpool run``, whose events tell of each step."""
    directory = base / uuid.uuid4().hex
    command = [
        *(sys.executable, "-m", "deadpool_megatron", "run"),
        *("--nodes", str(NODES), "--spares", "0", "--nproc-per-node", str(NPROC_PER_NODE)),
        *("--run-dir", str(directory), "--deadpool-cadence", "1"),
        *("--", "-m", "deadpool_megatron.trainer"),
    ]
    tail = EventTail(RunDirectory(directory).events)

    def new_steps() -> int:
        return sum(event.kind is Kind.STEP for event in tail.poll())

    log = directory.with_suffix(".log")
    measured = watch([*command, *training_arguments(tokens, steps)], log, steps, new_steps)
    try:
        story = read_story(directory)
    except ResultError as error:
        raise BenchError(str(error)) from error
    waits = [s for (_, iteration), s in story.gate_waits.items() if (iteration or 0) > _WARM_UP]
    measured.gate_waits, measured.gate_seconds = len(waits), sum(waits)
    if Kind.COMMITTED in story.bytes_by_kind:
        # Generation 0, after the build, is shipped as well.
        shipped = story.bytes_by_kind[Kind.COMMITTED]
        measured.shipped_bytes_per_step = shipped / (_WARM_UP + 1 + steps + 1)
    return measured


def watch(
    command: list[str],
    log: Path,
    steps: int,
    new_steps: Callable[[], int],
    variables: Mapping[str, str] | None = None,
    unmeasured_steps: int = 0,
    silence_seconds: float = _SILENCE_SECONDS,
) -> Measured:
    """Run to the end; ``new_steps`` answers how many steps were reported since it was asked last.

    ``unmeasured_steps``: so many follow after the measured ones. Raises BenchError when the run
    fails, or reports nothing for ``silence_seconds``.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    environment |= variables or {}
    expected = _WARM_UP + 1 + steps + unmeasured_steps
    measured = Measured()
    times: list[float] = []
    cpu_before = 0.0
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
            # Look at the child first: what it reported before it ended is then read below.
            over = child.poll() is not None
            for _ in range(new_steps()):
                silent_since = time.perf_counter()
                times.append(silent_since)
                if len(times) == _WARM_UP:
                    measured.memory_bytes = memory_bytes(mark)
                    cpu_before = cpu_seconds(mark)
                elif len(times) == _WARM_UP + 1 + steps:
                    measured.cpu_seconds_per_step = (cpu_seconds(mark) - cpu_before) / (steps + 1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_SECONDS)
    finally:
        _stop(child)
    if child.returncode != 0 or len(times) < expected:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        silence = "" if over else f"no step for {silence_seconds:.0f} s, stopped: "
        raise BenchError(
            f"{silence}exit status {child.returncode}, saw {len(times)} steps of {expected};"
            f" the end of its output:\n{end}"
        )
    # Memory was looked at while the step after the warm-up ran: measured are those after it.
    measured.step_seconds = [
        after - before
        for before, after in itertools.pairwise(times[_WARM_UP : _WARM_UP + 1 + steps])
    ]
    return measured


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a child that still runs: an interrupt first, so that it can clean up."""
    if child.poll() is not None:
        return
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def measure(tokens: int, rounds: int, steps: int, base: Path) -> dict[str, Any]:
    """Both sides in turns, and the ratios between them."""
    sides: dict[str, list[Measured]] = {"plain": [], "protected": []}
    for number in range(1, rounds + 1):
        for name, run in (("plain", run_plain), ("protected", run_protected)):
            print(f"{tokens} tokens, {name}, {number} of {rounds}", file=sys.stderr, flush=True)
            sides[name].append(run(tokens, steps, base))
    facts: dict[str, Any] = {name: facts_of(found) for name, found in sides.items()}
    times = {name: facts[name]["step_seconds"] for name in sides}
    facts["ratio"] = {
        key: times["protected"][key] / times["plain"][key] for key in ("mean", "p50", "p95", "p99")
    }
    facts["ratio_of_each_pair"] = [
        summary(b.step_seconds)["mean"] / summary(a.step_seconds)["mean"]
        for a, b in zip(sides["plain"], sides["protected"], strict=True)
    ]
    shipped = facts["protected"]["shipped_bytes_per_step"]
    facts["shipped_bytes_per_parameter_and_step"] = (
        None if shipped is None else shipped / parameters()
    )
    return facts


def facts_of(runs: list[Measured]) -> dict[str, Any]:
    """One side: all its runs taken together, and every single value."""
    everything = [seconds for run in runs for seconds in run.step_seconds]
    shipped = [r.shipped_bytes_per_step for r in runs if r.shipped_bytes_per_step is not None]
    gate = [run.gate_seconds for run in runs if run.gate_seconds is not None]
    return {
        "step_seconds": summary(everything),
        "cpu_seconds_per_step": summary([run.cpu_seconds_per_step for run in runs]),
        "memory_bytes": summary([float(run.memory_bytes) for run in runs]),
        "gate_seconds": sum(gate) if gate else None,
        "gate_waits": sum(run.gate_waits or 0 for run in runs),
        "shipped_bytes_per_step": sum(shipped) / len(shipped) if shipped else None,
        "runs": [run.step_seconds for run in runs],
    }


def main() -> int:
    """Run from the command line; answers the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="pairs of runs")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="measured per run")
    parser.add_argument(
        "--tokens",
        type=int,
        choices=TOKENS_PER_STEP,
        nargs="*",
        default=list(TOKENS_PER_STEP),
        help="per step",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2:
        parser.error("--rounds must be at least 1 and --steps at least 2")
    facts: dict[str, Any] = {
        "bench": "overhead",
        "machine": machine_facts(),
        "model": {
            "parameters": parameters(),
            "roles": NODES * NPROC_PER_NODE,
            "nodes": NODES,
        },
        "warm_up_steps": _WARM_UP,
        "tokens_per_step": {},
    }
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as base:
        for tokens in args.tokens:
            try:
                found = measure(tokens, args.rounds, args.steps, Path(base))
            except BenchError as error:
                print(f"overhead bench: {error}", file=sys.stderr)
                return 1
            facts["tokens_per_step"][str(tokens)] = found
    write_facts(args.out, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
