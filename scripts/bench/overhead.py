#!/usr/bin/env python
"""What protection costs while nothing fails: step time with it over step time without it.

    .venv/bin/python scripts/bench/overhead.py [--rounds N] [--steps N] [--out FILE]

A GPT of about 20 M parameters trains at 8,192 tokens per step and at a quarter of that, without
protection (stock gloo) and with it, in turns: A/B/A/B. Both report each step when it is done; the
time of a step is that between two reports, taken by this one observer. The first steps of a run
warm up and are not measured; of the others none is left out. Beside the ratio: seconds waited at
the commit gate, CPU seconds per step (in all, and by process and thread), bytes shipped per
parameter and step, memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.machine import ROOT, machine_facts, write_facts
from common.trainings import WARM_UP, BenchError, Measured, parameters, run_plain, watch

from deadpool_megatron.cli.show.report import read_story
from deadpool_megatron.cli.show.run_result import ResultError
from deadpool_megatron.cli.show.story import summary
from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Kind
from deadpool_megatron.trainer.arguments import TrainerConfig, parse_args

CONFIG = ROOT / "configs" / "20m.args"
TOKENS_PER_STEP = (8192, 2048)
NODES, NPROC_PER_NODE = 2, 2
_LEAST_SHOWN_SECONDS = 0.001


def model() -> TrainerConfig:
    """The sizes in the configuration file."""
    return parse_args([f"@{CONFIG}", "--lr-warmup-iters", "1"])


def training_arguments(tokens: int, steps: int) -> list[str]:
    """Flags of the trainer, the same with and without protection."""
    samples = tokens // model().seq_length
    return [
        *(f"@{CONFIG}", "--lr-warmup-iters", "1", "--log-interval", "1"),
        *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--global-batch-size", str(samples)),
        *("--train-iters", str(WARM_UP + 1 + steps)),
    ]


def run_protected(
    training: list[str],
    steps: int,
    base: Path,
    nodes: int = NODES,
    nproc_per_node: int = NPROC_PER_NODE,
    program: Sequence[str] = ("-m", "deadpool_megatron.trainer"),
    variables: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Measured:
    """The training under ``deadpool run`` with these flags, whose events tell of each step."""
    directory = base / uuid.uuid4().hex
    command = [
        *(sys.executable, "-m", "deadpool_megatron", "run"),
        *("--nodes", str(nodes), "--spares", "0", "--nproc-per-node", str(nproc_per_node)),
        *("--run-dir", str(directory), "--deadpool-cadence", "1", *flags),
        *("--", *program),
    ]
    tail = EventTail(RunDirectory(directory).events)

    def new_steps() -> int:
        return sum(event.kind is Kind.STEP for event in tail.poll())

    log = directory.with_suffix(".log")
    measured = watch([*command, *training], log, steps, new_steps, variables)
    try:
        story = read_story(directory)
    except ResultError as error:
        raise BenchError(str(error)) from error
    waits = [s for (_, iteration), s in story.gate_waits.items() if (iteration or 0) > WARM_UP]
    measured.gate_waits, measured.gate_seconds = len(waits), sum(waits)
    if Kind.COMMITTED in story.bytes_by_kind:
        # Generation 0, after the build, is shipped as well.
        shipped = story.bytes_by_kind[Kind.COMMITTED]
        measured.shipped_bytes_per_step = shipped / (WARM_UP + 1 + steps + 1)
    return measured


def measure(tokens: int, rounds: int, steps: int, base: Path) -> dict[str, Any]:
    """Both sides in turns, and the ratios between them."""
    sides: dict[str, list[Measured]] = {"plain": [], "protected": []}
    training = training_arguments(tokens, steps)
    for number in range(1, rounds + 1):
        for name, runs in sides.items():
            print(f"{tokens} tokens, {name}, {number} of {rounds}", file=sys.stderr, flush=True)
            if name == "plain":
                runs.append(run_plain(training, NODES * NPROC_PER_NODE, steps, base))
            else:
                runs.append(run_protected(training, steps, base))
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
        None if shipped is None else shipped / parameters(model())
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
        "thread_seconds_per_step": _mean_of_threads(runs),
        "memory_bytes": summary([float(run.memory_bytes) for run in runs]),
        "gate_seconds": sum(gate) if gate else None,
        "gate_waits": sum(run.gate_waits or 0 for run in runs),
        "shipped_bytes_per_step": sum(shipped) / len(shipped) if shipped else None,
        "runs": [run.step_seconds for run in runs],
    }


def _mean_of_threads(runs: list[Measured]) -> dict[str, float]:
    """The most first; what is less than a millisecond in a step is left out."""
    total = sum((run.thread_seconds_per_step for run in runs), Counter[str]())
    return {
        name: seconds / len(runs)
        for name, seconds in total.most_common()
        if seconds / len(runs) >= _LEAST_SHOWN_SECONDS
    }


def main() -> int:
    """Run from the command line; returns the exit status."""
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
            "parameters": parameters(model()),
            "roles": NODES * NPROC_PER_NODE,
            "nodes": NODES,
        },
        "warm_up_steps": WARM_UP,
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
