#!/usr/bin/env python
"""What peers that hold the same state save when each captures a part of it.

    .venv/bin/python scripts/bench/shared_snapshots.py [--rounds N] [--steps N] [--out FILE]

Four data-parallel peers without the distributed optimizer, on four nodes of this machine, with
``--deadpool-share-snapshots`` off and on, in turns. The first steps of a run warm up; of the
measured ones none is left out. Memory is that of all processes and their segments.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from common.command import in_turns, parser_of, run_bench
from common.struck import SIZES, size_flags
from common.trainings import WARM_UP, Measured, run_protected
from overhead import facts_of

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
    parser = parser_of(__doc__, 2, "pairs of runs", 12)
    parser.add_argument("--size", choices=SIZES, default="5M")
    args = parser.parse_args()
    training = training_arguments(args.size, args.steps)

    def measured(base: Path) -> dict[str, Any]:
        def run(side: str, _: int) -> Measured:
            flags = ("--spares", "0", "--deadpool-share-snapshots", side)
            return run_protected(training, args.steps, base, PEERS, 1, flags)

        runs = in_turns("sharing", args.rounds, {side: partial(run, side) for side in SIDES})
        facts = {side: facts_of(found) for side, found in runs.items()}
        return {"peers": PEERS, "size": args.size, "warm_up_steps": WARM_UP, **facts}

    return run_bench("shared-snapshots", args.out, measured)


if __name__ == "__main__":
    sys.exit(main())
