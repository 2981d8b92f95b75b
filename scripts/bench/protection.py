#!/usr/bin/env python
"""What each scheme of protection costs, and how fast it brings back a lost node.

    .venv/bin/python scripts/bench/protection.py [--rounds N] [--size NAME...] [--out FILE]

Four roles (PP2 x DP2, distributed optimizer) on four nodes and a spare, at three sizes. In each
round every scheme takes its turn, and the same training without protection (stock gloo) before
them. The first steps warm up; of the measured ones none is left out. After them one node is killed
(``local`` and ``local-twice``, which survive no lost node: one process), and the run goes on for
some steps.

Per scheme: step time over that without protection, seconds waited at the commit gate, bytes
shipped and stored per parameter, host memory, CPU seconds per GB shipped, seconds of the recovery
and of its phase ``restore``, and whether the struck run computed the same as an undisturbed one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.machine import machine_facts, write_facts
from common.struck import (
    NODES,
    SIZES,
    TOKENS,
    Protected,
    run_protected,
    sizes_of,
    training_arguments,
)
from common.trainings import WARM_UP, BenchError, Measured, parameters, run_plain

from deadpool_megatron.cli.show.compare import compare_results
from deadpool_megatron.cli.show.run_result import RunResult
from deadpool_megatron.cli.show.story import summary

SCHEMES: dict[str, list[str]] = {
    "buddy": ["--deadpool-protection", "buddy"],
    "parity": ["--deadpool-protection", "parity", "--deadpool-parity-group", "2"],
    "parity of 3": ["--deadpool-protection", "parity", "--deadpool-parity-group", "3"],
    "recompute": ["--deadpool-protection", "recompute", "--deadpool-full-every", "8"],
    "local": ["--deadpool-protection", "local"],
    "local-twice": ["--deadpool-protection", "local-twice"],
}


def measure(name: str, rounds: int, steps: int, schemes: list[str], base: Path) -> dict[str, Any]:
    """One size: all schemes in turns."""
    count = parameters(sizes_of(name))
    training = training_arguments(name, WARM_UP + 1 + steps)
    print(f"{name}: undisturbed run to compare with", file=sys.stderr, flush=True)
    undisturbed = run_protected(name, SCHEMES["buddy"], steps, base).result
    assert undisturbed is not None
    plain: list[Measured] = []
    runs: dict[str, list[Protected]] = {scheme: [] for scheme in schemes}
    for number in range(1, rounds + 1):
        print(f"{name}: no protection, {number} of {rounds}", file=sys.stderr, flush=True)
        plain.append(run_plain(training, NODES, steps, base))
        for scheme in schemes:
            print(f"{name}: {scheme}, {number} of {rounds}", file=sys.stderr, flush=True)
            victim = "self" if scheme.startswith("local") else "node"
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
    """Run from the command line; returns the exit status."""
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
