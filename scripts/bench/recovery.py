#!/usr/bin/env python
"""How long a recovery takes: seconds of each phase, and from the kill to the next finished step.

    .venv/bin/python scripts/bench/recovery.py [--repeats N] [--out FILE]

Eight roles on four nodes (the demo's run). The two kinds of failure take turns, A/B/A/B: a whole
node is killed (the spare takes over), one process is killed (it is started again in place). Each
struck run is compared with one undisturbed run; a difference is reported and makes the exit
status 1. No value is left out of the means.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.machine import machine_facts, write_facts

from deadpool_megatron.cli.show.demo import DemoError, Outcome, judge, kill_in_backward, run_once
from deadpool_megatron.cli.show.live import PlainDisplay
from deadpool_megatron.cli.show.story import summary

KINDS = {"node killed": "node", "process killed": "self"}


def measure(repeats: int, iterations: int, base: Path) -> dict[str, Any]:
    """All runs. Raises DemoError when one fails."""
    display = PlainDisplay(sys.stderr)
    display.line("undisturbed run")
    undisturbed = run_once(display, base, "undisturbed", iterations)
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    for repeat in range(1, repeats + 1):
        for kind, target in KINDS.items():
            display.line(f"{kind}, {repeat} of {repeats}")
            # Another iteration each time, so that no phase of a cycle is favoured.
            strike = 4 + repeat % (iterations - 5)
            name = f"{target}-{repeat}"
            struck = run_once(display, base, name, iterations, kill_in_backward(strike, target))
            outcomes[kind].append(judge(undisturbed, struck, strike))
    return {kind: facts_of(found) for kind, found in outcomes.items()}


def facts_of(outcomes: list[Outcome]) -> dict[str, Any]:
    """Means and percentiles over the runs of one kind, and every single run."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each kind")
    parser.add_argument("--iterations", type=int, default=12, metavar="N", help="steps per run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args()
    if args.repeats < 1 or args.iterations < 8:
        parser.error("--repeats must be at least 1 and --iterations at least 8")
    facts: dict[str, Any] = {"bench": "recovery", "machine": machine_facts()}
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as base:
        try:
            facts["kinds"] = measure(args.repeats, args.iterations, Path(base))
        except DemoError as error:
            print(f"recovery bench: {error}", file=sys.stderr)
            return error.status
    write_facts(args.out, facts)
    return 0 if all(kind["bit_identical"] for kind in facts["kinds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
