#!/usr/bin/env python
"""What each scheme of protection costs, and how fast it brings back a lost node.

    .venv/bin/python scripts/bench/protection.py [--rounds N] [--size NAME...] [--out FILE]

Four roles (PP2 x DP2, distributed optimizer) on four nodes and a spare, at three sizes. In each
round every scheme takes its turn, and the same training without protection (stock gloo) before
them. The first steps warm up; of the measured ones none is left out. After them one node is killed
(``local``, which survives no lost node: one process), and the run goes on for some steps.

Per scheme: step time over that without protection, seconds waited at the commit gate, bytes
shipped and stored per parameter, host memory, CPU seconds per GB shipped, seconds of the recovery
and of its phase ``restore``, and whether the struck run computed the same as an undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.machine import ROOT, machine_facts, write_facts
from overhead import BenchError, Measured, watch

from deadpool_megatron.cli.show.compare import compare_results
from deadpool_megatron.cli.show.numbers import TimedStep
from deadpool_megatron.cli.show.report import read_story
from deadpool_megatron.cli.show.results import ResultError, RunResult, read_result
from deadpool_megatron.cli.show.story import summary
from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, segment_root
from deadpool_megatron.events import Kind
from deadpool_megatron.failpoints import ENVIRONMENT_NAME as FAULTS_VARIABLE
from deadpool_megatron.trainer.arguments import TrainerConfig, parse_args

NODES = 4
WARM_UP = 3
# Unmeasured steps before and after the one that is interrupted.
BEFORE, AFTER = 2, 4
# The configuration file and what is changed in it: hidden size, layers.
SIZES = {"5M": (256, 6), "20M": (512, 6), "50M": (832, 6)}
TOKENS = 2048
SCHEMES: dict[str, list[str]] = {
    "buddy": ["--deadpool-protection", "buddy"],
    "parity": ["--deadpool-protection", "parity", "--deadpool-parity-group", "2"],
    "parity of 3": ["--deadpool-protection", "parity", "--deadpool-parity-group", "3"],
    "recompute": ["--deadpool-protection", "recompute", "--deadpool-full-every", "8"],
    "local": ["--deadpool-protection", "local"],
}


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
    return parse_args([f"@{ROOT / 'configs' / '20m.args'}", *_size_flags(name)])


def _size_flags(name: str) -> list[str]:
    hidden, layers = SIZES[name]
    heads = str(hidden // 64)
    return [
        *("--hidden-size", str(hidden), "--num-layers", str(layers)),
        *("--num-attention-heads", heads, "--lr-warmup-iters", "1"),
    ]


def parameters(name: str) -> int:
    """Trained numbers; the embedding counts twice, first and last stage hold one each."""
    config = sizes_of(name)
    hidden = config.hidden_size
    layer = 12 * hidden**2 + 13 * hidden
    embeddings = (2 * config.vocab_size + config.seq_length) * hidden
    return embeddings + config.num_layers * layer + 2 * hidden


def training_arguments(name: str, iterations: int) -> list[str]:
    """Flags of the trainer, the same with and without protection."""
    return [
        *(f"@{ROOT / 'configs' / '20m.args'}", *_size_flags(name), "--log-interval", "1"),
        *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--global-batch-size", str(TOKENS // sizes_of(name).seq_length)),
        *("--micro-batch-size", "2", "--train-iters", str(iterations)),
    ]


def run_plain(name: str, steps: int, base: Path) -> Measured:
    """The training on stock gloo, which prints a line per step."""
    program = Path(__file__).with_name("common") / "plain_ranks.py"
    command = [sys.executable, str(program), str(NODES)]
    log = base / f"{uuid.uuid4().hex}.log"
    log.touch()
    with open(log) as lines:

        def new_steps() -> int:
            return sum("iteration " in line and " | loss " in line for line in lines)

        arguments = training_arguments(name, WARM_UP + 1 + steps)
        return watch([*command, *arguments], log, steps, new_steps)


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


def measure(name: str, rounds: int, steps: int, schemes: list[str], base: Path) -> dict[str, Any]:
    """One size: all schemes in turns."""
    count = parameters(name)
    print(f"{name}: undisturbed run to compare with", file=sys.stderr, flush=True)
    undisturbed = run_protected(name, SCHEMES["buddy"], steps, base).result
    assert undisturbed is not None
    plain: list[Measured] = []
    runs: dict[str, list[Protected]] = {scheme: [] for scheme in schemes}
    for number in range(1, rounds + 1):
        print(f"{name}: no protection, {number} of {rounds}", file=sys.stderr, flush=True)
        plain.append(run_plain(name, steps, base))
        for scheme in schemes:
            print(f"{name}: {scheme}, {number} of {rounds}", file=sys.stderr, flush=True)
            victim = "self" if scheme == "local" else "node"
            runs[scheme].append(run_protected(name, SCHEMES[scheme], steps, base, victim))
    return {
        "parameters": count,
        "plain": {
            "step_seconds": summary([s for run in plain for s in run.step_seconds]),
            "cpu_seconds_per_step": summary([run.cpu_seconds_per_step for run in plain]),
            "memory_bytes": summary([float(run.memory_bytes) for run in plain]),
            "runs": [run.step_seconds for run in plain],
        },
        "schemes": {
            scheme: facts_of(found, plain, count, undisturbed) for scheme, found in runs.items()
        },
    }


def facts_of(
    runs: list[Protected], plain: list[Measured], count: int, undisturbed: RunResult
) -> dict[str, Any]:
    """One scheme at one size: all its runs, and every single value."""
    steps = summary([seconds for run in runs for seconds in run.measured.step_seconds])
    base = summary([seconds for run in plain for seconds in run.step_seconds])
    recoveries = [run.result.recoveries[0] for run in runs if run.result is not None]
    shipped = [run.measured.shipped_bytes_per_step or 0.0 for run in runs]
    results = [run.result for run in runs if run.result is not None]
    return {
        "step_seconds": steps,
        "ratio": {key: steps[key] / base[key] for key in ("mean", "p50", "p95", "p99")},
        "ratio_of_each_round": [
            summary(with_it.measured.step_seconds)["mean"] / summary(without.step_seconds)["mean"]
            for without, with_it in zip(plain, runs, strict=True)
        ],
        "gate_seconds": sum(run.measured.gate_seconds or 0.0 for run in runs),
        "gate_waits": sum(run.measured.gate_waits or 0 for run in runs),
        "cpu_seconds_per_step": summary([run.measured.cpu_seconds_per_step for run in runs]),
        "cpu_seconds_per_gb_shipped": _per_gb(runs, plain, shipped),
        "shipped_bytes_per_parameter_and_step": summary([each / count for each in shipped]),
        "own_bytes_per_parameter": summary([run.own_bytes / count for run in runs]),
        "kept_for_others_bytes_per_parameter": summary([run.kept_bytes / count for run in runs]),
        "memory_bytes": summary([float(run.measured.memory_bytes) for run in runs]),
        "recovery_seconds": summary([found.seconds for found in recoveries]),
        "restore_seconds": summary([found.phases.get("restore", 0.0) for found in recoveries]),
        "exposed_seconds": summary([found.exposed_seconds or 0.0 for found in recoveries]),
        "steps_recomputed": [found.steps_recomputed for found in recoveries],
        "bit_identical": all(compare_results(undisturbed, each).identical for each in results),
        "runs": [run.measured.step_seconds for run in runs],
    }


def _per_gb(
    runs: list[Protected], plain: list[Measured], shipped: list[float]
) -> dict[str, float] | None:
    """CPU seconds per GB, of everything that protection adds to a step; None if nothing travels."""
    if not any(shipped):
        return None
    without = summary([run.cpu_seconds_per_step for run in plain])["mean"]
    return summary(
        [
            (run.measured.cpu_seconds_per_step - without) / (each / 1e9)
            for run, each in zip(runs, shipped, strict=True)
        ]
    )


def main() -> int:
    """Run from the command line; answers the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="turns of each scheme")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="measured per run")
    parser.add_argument("--size", choices=SIZES, nargs="*", default=list(SIZES))
    parser.add_argument("--scheme", choices=SCHEMES, nargs="*", default=list(SCHEMES))
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2:
        parser.error("--rounds must be at least 1 and --steps at least 2")
    facts: dict[str, Any] = {
        "bench": "protection",
        "machine": machine_facts(),
        "nodes": NODES,
        "tokens_per_step": TOKENS,
        "warm_up_steps": WARM_UP,
        "flags": {scheme: SCHEMES[scheme] for scheme in args.scheme},
        "sizes": {},
    }
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as base:
        for name in args.size:
            try:
                found = measure(name, args.rounds, args.steps, args.scheme, Path(base))
            except BenchError as error:
                print(f"protection bench: {error}", file=sys.stderr)
                return 1
            facts["sizes"][name] = found
    write_facts(args.out, facts)
    schemes = [one for size in facts["sizes"].values() for one in size["schemes"].values()]
    return 0 if all(one["bit_identical"] for one in schemes) else 1


if __name__ == "__main__":
    sys.exit(main())
