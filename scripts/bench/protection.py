#!/usr/bin/env python
"""The cost of each scheme of protection, and the time in which it recovers a lost node.

    .venv/bin/python scripts/bench/protection.py [--rounds N] [--size NAME...] [--out FILE]

Four roles (PP2 x DP2, distributed optimizer) on four nodes and a spare, at three sizes. In each
round every scheme takes its turn, and the same training without protection (stock gloo) before
them. The first steps warm up; all others before the fault count. Then one node is killed (``local``
and ``local-twice``, which survive no lost node: one process), and the run continues for some steps.

Per scheme: step time over that without protection, seconds waited at the commit gate, bytes
shipped and stored per parameter, host memory, CPU seconds per GB shipped, seconds of the recovery
and of its phase ``restore``, and whether the struck run computed the same as an undisturbed run.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from common.command import in_turns, parser_of, run_bench
from common.struck import (
    NODES,
    SIZES,
    TOKENS,
    Protected,
    run_protected,
    sizes_of,
    training_arguments,
)
from common.trainings import WARM_UP, Measured, parameters, run_plain
from overhead import facts_of as facts_of_all, ratios_of

from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import RunResult
from deadpool_megatron.observe.steps import summary

SCHEMES: dict[str, list[str]] = {
    "buddy": ["--deadpool-protection", "buddy"],
    "parity": ["--deadpool-protection", "parity", "--deadpool-parity-group", "2"],
    "parity of 3": ["--deadpool-protection", "parity", "--deadpool-parity-group", "3"],
    "local": ["--deadpool-protection", "local"],
    "local-twice": ["--deadpool-protection", "local-twice"],
}


def measure(name: str, rounds: int, steps: int, schemes: list[str], base: Path) -> dict[str, Any]:
    """Run all schemes of a size in turns."""
    count = parameters(sizes_of(name))
    training = training_arguments(name, WARM_UP + 1 + steps)
    print(f"{name}: undisturbed run to compare with", file=sys.stderr, flush=True)
    undisturbed = run_protected(name, SCHEMES["buddy"], steps, base).result
    assert undisturbed is not None

    def struck(scheme: str, _: int) -> Protected:
        victim = "self" if scheme.startswith("local") else "node"
        return run_protected(name, SCHEMES[scheme], steps, base, victim)

    def unprotected(_: int) -> Protected:
        return Protected(run_plain(training, NODES, steps, base))

    sides = {"plain": unprotected} | {scheme: partial(struck, scheme) for scheme in schemes}
    runs = in_turns(name, rounds, sides)
    plain = [run.measured for run in runs.pop("plain")]
    return {
        "parameters": count,
        "plain": facts_of_all(plain),
        "schemes": {
            scheme: facts_of(found, plain, count, undisturbed) for scheme, found in runs.items()
        },
    }


def facts_of(
    runs: list[Protected], plain: list[Measured], count: int, undisturbed: RunResult
) -> dict[str, Any]:
    """Return the facts of a scheme at a size: all its runs, and every single value."""
    measured = [run.measured for run in runs]
    ratios = ratios_of(plain, measured)
    results = [run.result for run in runs if run.result is not None]
    recoveries = [result.recoveries[0] for result in results]
    shipped = [run.shipped_bytes_per_step or 0.0 for run in measured]
    return {
        **facts_of_all(measured),
        "ratio": ratios["ratio"],
        "ratio_of_each_round": ratios["ratio_of_each_pair"],
        "cpu_seconds_per_gb_shipped": _per_gb(measured, plain, shipped),
        "shipped_bytes_per_parameter_and_step": summary([each / count for each in shipped]),
        "own_bytes_per_parameter": summary([run.own_bytes / count for run in runs]),
        "kept_for_others_bytes_per_parameter": summary([run.kept_bytes / count for run in runs]),
        "recovery_seconds": summary([found.seconds for found in recoveries]),
        "restore_seconds": summary([found.phases.get("restore", 0.0) for found in recoveries]),
        "exposed_seconds": summary([found.exposed_seconds or 0.0 for found in recoveries]),
        "steps_recomputed": [found.steps_recomputed for found in recoveries],
        "bit_identical": all(compare_results(undisturbed, each).identical for each in results),
    }


def _per_gb(
    runs: list[Measured], plain: list[Measured], shipped: list[float]
) -> dict[str, float] | None:
    """Return the CPU seconds of protection in a step per GB shipped; None if nothing is shipped."""
    if not any(shipped):
        return None
    without = summary([run.cpu_seconds_per_step for run in plain])["mean"]
    return summary(
        [
            (run.cpu_seconds_per_step - without) / (each / 1e9)
            for run, each in zip(runs, shipped, strict=True)
        ]
    )


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 2, "turns of each scheme", 12)
    parser.add_argument("--size", choices=SIZES, nargs="*", default=list(SIZES))
    parser.add_argument("--scheme", choices=SCHEMES, nargs="*", default=list(SCHEMES))
    args = parser.parse_args()

    def measured(base: Path) -> dict[str, Any]:
        return {
            "nodes": NODES,
            "tokens_per_step": TOKENS,
            "warm_up_steps": WARM_UP,
            "flags": {scheme: SCHEMES[scheme] for scheme in args.scheme},
            "sizes": {
                name: measure(name, args.rounds, args.steps, args.scheme, base)
                for name in args.size
            },
        }

    def is_good(facts: dict[str, Any]) -> bool:
        schemes = [case for size in facts["sizes"].values() for case in size["schemes"].values()]
        return all(case["bit_identical"] for case in schemes)

    return run_bench("protection", args.out, measured, is_good)


if __name__ == "__main__":
    sys.exit(main())
