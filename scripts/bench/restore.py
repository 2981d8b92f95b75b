#!/usr/bin/env python
"""Going on after the loss of a node: from memory against from a checkpoint on local disk.

    .venv/bin/python scripts/bench/restore.py [--rounds N] [--size NAME...] [--out FILE]

The same training on the same nodes loses the same node in the same iteration. One side keeps
copies on other nodes (``buddy``); the other keeps none (``local``) and writes a torch_dist
checkpoint after every iteration, so that it has to go back no further. Both go on in the same
processes with the same spare, and find the file cache warm. Copies are made beside the training,
which waits for a checkpoint until it is written: so the times of the steps before the loss belong
to the comparison. The sides take turns; no value is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.machine import machine_facts, write_facts
from common.struck import SIZES, Protected, run_protected, sizes_of
from common.trainings import BenchError, parameters

from deadpool_megatron.cli.show.compare import compare_results
from deadpool_megatron.cli.show.run_result import RunResult
from deadpool_megatron.cli.show.story import summary

STEPS = 6
# Side -> (flags of deadpool, flags of the trainer).
SIDES: dict[str, tuple[list[str], list[str]]] = {
    "memory": (["--deadpool-protection", "buddy"], []),
    "checkpoint": (["--deadpool-protection", "local"], ["--save-interval", "1"]),
}


def measure(name: str, rounds: int, base: Path) -> dict[str, Any]:
    """One size: both sides in turns."""
    undisturbed = run_protected(name, [], STEPS, base).result
    assert undisturbed is not None
    runs: dict[str, list[Protected]] = {side: [] for side in SIDES}
    for number in range(1, rounds + 1):
        for side, (flags, training) in SIDES.items():
            print(f"{name}: {side}, {number} of {rounds}", file=sys.stderr, flush=True)
            if training:
                training = [*training, "--save", str(base / f"{name}-{number}")]
            runs[side].append(run_protected(name, flags, STEPS, base, "node", training))
    facts: dict[str, Any] = {side: facts_of(found, undisturbed) for side, found in runs.items()}
    facts["parameters"] = parameters(sizes_of(name))
    for key in ("restore_seconds", "recovery_seconds"):
        slow, fast = facts["checkpoint"][key]["mean"], facts["memory"][key]["mean"]
        facts[f"{key}_checkpoint_over_memory"] = slow / fast
    return facts


def facts_of(runs: list[Protected], undisturbed: RunResult) -> dict[str, Any]:
    """One side: means and every single recovery."""
    results = [run.result for run in runs if run.result is not None]
    recoveries = [result.recoveries[0] for result in results]
    return {
        "step_seconds": summary([each for run in runs for each in run.measured.step_seconds]),
        "restore_seconds": summary([found.phases.get("restore", 0.0) for found in recoveries]),
        "recovery_seconds": summary([found.seconds for found in recoveries]),
        "steps_recomputed": [found.steps_recomputed for found in recoveries],
        "bit_identical": all(compare_results(undisturbed, each).identical for each in results),
        "runs": [{"seconds": one.seconds, "phases": dict(one.phases)} for one in recoveries],
    }


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each side")
    parser.add_argument("--size", choices=SIZES, nargs="*", default=list(SIZES))
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    facts: dict[str, Any] = {"bench": "restore", "machine": machine_facts(), "sizes": {}}
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as base:
        for name in args.size:
            try:
                facts["sizes"][name] = measure(name, args.rounds, Path(base))
            except BenchError as error:
                print(f"restore bench: {error}", file=sys.stderr)
                return 1
    write_facts(args.out, facts)
    sides = [size[side] for size in facts["sizes"].values() for side in SIDES]
    return 0 if all(one["bit_identical"] for one in sides) else 1


if __name__ == "__main__":
    sys.exit(main())
