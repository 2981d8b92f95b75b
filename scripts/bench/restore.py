#!/usr/bin/env python
"""Restore after the loss of a node: from memory against from a checkpoint on local disk.

    .venv/bin/python scripts/bench/restore.py [--rounds N] [--size NAME...] [--out FILE]

The same training on the same nodes loses the same node in the same iteration. One side keeps
copies on other nodes (``buddy``); the other keeps none (``local``) and writes a torch_dist
checkpoint after every iteration, so that it has to go back no further. Both continue in the same
processes with the same spare, and find the file cache warm. Copies are made while training runs,
but it waits for a checkpoint until it is written: so the times of the steps before the loss belong
to the comparison. The sides take turns; all values count.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from common.command import in_turns, parser_of, run_bench
from common.struck import SIZES, Protected, run_protected, sizes_of
from common.trainings import parameters

from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import RunResult
from deadpool_megatron.observe.steps import summary

STEPS = 6
# Side -> (flags of deadpool, flags of the trainer).
SIDES: dict[str, tuple[list[str], list[str]]] = {
    "memory": (["--deadpool-protection", "buddy"], []),
    "checkpoint": (["--deadpool-protection", "local"], ["--save-interval", "1"]),
}


def measure(name: str, rounds: int, base: Path) -> dict[str, Any]:
    """Run both sides of a size in turns."""
    undisturbed = run_protected(name, [], STEPS, base).result
    assert undisturbed is not None

    def struck(side: str, number: int) -> Protected:
        flags, training = SIDES[side]
        if training:
            training = [*training, "--save", str(base / f"{name}-{number}")]
        return run_protected(name, flags, STEPS, base, "node", training)

    runs = in_turns(name, rounds, {side: partial(struck, side) for side in SIDES})
    facts: dict[str, Any] = {side: facts_of(found, undisturbed) for side, found in runs.items()}
    facts["parameters"] = parameters(sizes_of(name))
    for key in ("restore_seconds", "recovery_seconds"):
        slow, fast = facts["checkpoint"][key]["mean"], facts["memory"][key]["mean"]
        facts[f"{key}_checkpoint_over_memory"] = slow / fast
    return facts


def facts_of(runs: list[Protected], undisturbed: RunResult) -> dict[str, Any]:
    """Return the facts of a side: means and every single recovery."""
    results = [run.result for run in runs if run.result is not None]
    recoveries = [result.recoveries[0] for result in results]
    return {
        "step_seconds": summary([each for run in runs for each in run.measured.step_seconds]),
        "restore_seconds": summary([found.phases.get("restore", 0.0) for found in recoveries]),
        "recovery_seconds": summary([found.seconds for found in recoveries]),
        "steps_recomputed": [found.steps_recomputed for found in recoveries],
        "bit_identical": all(compare_results(undisturbed, each).identical for each in results),
        "runs": [{"seconds": found.seconds, "phases": dict(found.phases)} for found in recoveries],
    }


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 3, "turns of each side")
    parser.add_argument("--size", choices=SIZES, nargs="*", default=list(SIZES))
    args = parser.parse_args()

    def measured(base: Path) -> dict[str, Any]:
        return {"sizes": {name: measure(name, args.rounds, base) for name in args.size}}

    def is_good(facts: dict[str, Any]) -> bool:
        sides = [size[side] for size in facts["sizes"].values() for side in SIDES]
        return all(side["bit_identical"] for side in sides)

    return run_bench("restore", args.out, measured, is_good)


if __name__ == "__main__":
    sys.exit(main())
