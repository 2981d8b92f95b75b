#!/usr/bin/env python
"""What peers that hold the same state save when each captures a part of it.

    .venv/bin/python scripts/bench/shared_snapshots.py [--rounds N] [--steps N] [--out FILE]

Four data-parallel peers without the distributed optimizer, on four nodes of this machine, with
``--deadpool-share-snapshots`` off and on, in turns. The first steps of a run warm up; of the
measured ones none is left out. Memory is that of all processes and their segments.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.machine import machine_facts, write_facts
from common.struck import SIZES, size_flags
from common.trainings import WARM_UP, BenchError, Measured
from overhead import facts_of, run_protected

PEERS = 4
SIDES = ("off", "on")
_SAMPLES = 16


def training_arguments(size: str, steps: int) -> list[str]:
    """Flags of the trainer, the same on both sides."""
    return [
        *(*size_flags(size), "--log-interval", "1"),
        *("--global-batch-size", str(_SAMPLES)),
        *("--train-iters", str(WARM_UP + 1 + steps)),
    ]


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="pairs of runs")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="measured per run")
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2:
        parser.error("--rounds must be at least 1 and --steps at least 2")
    facts: dict[str, Any] = {
        "bench": "shared-snapshots",
        "machine": machine_facts(),
        "peers": PEERS,
        "size": args.size,
        "warm_up_steps": WARM_UP,
    }
    training = training_arguments(args.size, args.steps)
    runs: dict[str, list[Measured]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as base:
        for number in range(1, args.rounds + 1):
            for side in SIDES:
                print(f"sharing {side}, {number} of {args.rounds}", file=sys.stderr, flush=True)
                flags = ("--deadpool-share-snapshots", side)
                try:
                    runs[side].append(
                        run_protected(training, args.steps, Path(base), PEERS, 1, flags=flags)
                    )
                except BenchError as error:
                    print(f"shared snapshots bench: {error}", file=sys.stderr)
                    return 1
    write_facts(args.out, facts | {side: facts_of(found) for side, found in runs.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
