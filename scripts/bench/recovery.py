#!/usr/bin/env python
"""The time of a recovery: seconds of each phase, and from the kill to the next finished step.

    .venv/bin/python scripts/bench/recovery.py [--rounds N] [--out FILE]

Eight roles on four nodes (the demo's run). The kinds of failure take turns: a whole node is killed
(the spare takes over), one process is killed (it is started again in place), one raises an
exception (it ends, and is started again). Each struck run is compared with one undisturbed run; a
difference is reported and makes the exit status 1. No value is left out of the means.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from common.command import at_least, in_turns, parser_of, run_bench
from common.trainings import BenchError

from deadpool_megatron.cli.demo import DemoError, Outcome, compare_runs, kill_fault, run_once
from deadpool_megatron.cli.display import Display
from deadpool_megatron.observe.steps import summary

KINDS = {
    "node killed": {"target": "node"},
    "process killed": {"target": "self"},
    "process raises": {"target": "self", "action": "raise"},
}


def measure(repeats: int, iterations: int, base: Path) -> dict[str, Any]:
    """Run all kinds in turns. Raises DemoError when a run fails."""
    display = Display(sys.stderr)
    display.line("undisturbed run")
    undisturbed = run_once(display, base, "undisturbed", iterations)

    def struck(fields: dict[str, str], repeat: int) -> Outcome:
        # Another iteration each time, so that no phase of a cycle is favoured.
        strike = 4 + repeat % (iterations - 5)
        fault = kill_fault(strike, fields["target"]) | fields
        run = run_once(display, base, f"{'-'.join(fields.values())}-{repeat}", iterations, fault)
        return compare_runs(undisturbed, run, strike)

    sides = {kind: partial(struck, fields) for kind, fields in KINDS.items()}
    outcomes = in_turns("recovery", repeats, sides)
    return {kind: facts_of(found) for kind, found in outcomes.items()}


def facts_of(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return means and percentiles over the runs of one kind, and every single run."""
    phases = {name: None for outcome in outcomes for name in outcome.recovery.phases}
    ends = [o.kill_to_next_step for o in outcomes if o.kill_to_next_step is not None]
    return {
        "bit_identical": all(outcome.comparison.identical for outcome in outcomes),
        "kill_to_next_step_seconds": summary(ends),
        "phases_seconds": {
            name: summary([o.recovery.phases[name] for o in outcomes if name in o.recovery.phases])
            for name in phases
        },
        "steps_recomputed": [outcome.recovery.steps_recomputed for outcome in outcomes],
        "exposed_seconds": summary([o.recovery.exposed_seconds or 0.0 for o in outcomes]),
        "runs": [outcome.to_dict() for outcome in outcomes],
    }


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 5, "of each kind")
    iterations = at_least(8)
    parser.add_argument(
        "--iterations", type=iterations, default=12, metavar="N", help="steps per run"
    )
    args = parser.parse_args()

    def measured(base: Path) -> dict[str, Any]:
        try:
            return {"kinds": measure(args.rounds, args.iterations, base)}
        except DemoError as error:
            raise BenchError(str(error)) from error

    def is_good(facts: dict[str, Any]) -> bool:
        return all(kind["bit_identical"] for kind in facts["kinds"].values())

    return run_bench("recovery", args.out, measured, is_good)


if __name__ == "__main__":
    sys.exit(main())
