#!/usr/bin/env python
"""The cost of protection as a run grows: 4, 8 and 16 roles, 2 to 8 data-parallel peers.

    .venv/bin/python scripts/bench/scaling.py [--rounds N] [--steps N] [--seconds S] [--out FILE]

A GPT of about 5 M parameters trains without protection (stock gloo) and with it, in turns. Each
step takes ``--seconds`` longer, without use of a processor, as if a device computed: on few cores
the processes of many roles would compete for them, and only that would be measured. All steps after
the warm-up count.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.command import at_least, in_turns, parser_of, run_bench
from common.machine import ROOT
from common.slow_steps import VARIABLE
from common.trainings import WARM_UP, parameters, run_plain, run_protected
from overhead import facts_of

from deadpool_megatron.trainer.config import parse_args

CONFIG = ROOT / "configs" / "small.args"
NPROC_PER_NODE = 2
_SLOW_STEPS = ROOT / "scripts" / "bench" / "common" / "slow_steps.py"


@dataclass(frozen=True)
class Size:
    """Sizes of the dimensions."""

    tensor: int
    pipeline: int
    data: int

    @property
    def roles(self) -> int:
        return self.tensor * self.pipeline * self.data


SIZES = (Size(1, 2, 2), Size(2, 2, 2), Size(1, 2, 4), Size(2, 2, 4), Size(1, 2, 8))


def training_arguments(size: Size, steps: int) -> list[str]:
    """Return the trainer's flags, the same with and without protection."""
    return [
        *(f"@{CONFIG}", "--lr-warmup-iters", "1", "--log-interval", "1"),
        *("--tensor-model-parallel-size", str(size.tensor)),
        *("--pipeline-model-parallel-size", str(size.pipeline)),
        *("--use-distributed-optimizer", "--train-iters", str(WARM_UP + 1 + steps)),
    ]


def measure(size: Size, args: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Run both sides in turns, and return the ratio between them."""
    training = training_arguments(size, args.steps)
    variables = {VARIABLE: str(args.seconds)}
    nodes = size.roles // NPROC_PER_NODE
    program = [str(_SLOW_STEPS), "protected"]
    sides = in_turns(
        size,
        args.rounds,
        {
            "plain": lambda _: run_plain(
                training, size.roles, args.steps, base, variables=variables
            ),
            "protected": lambda _: run_protected(
                *(training, args.steps, base, nodes, NPROC_PER_NODE),
                program=program,
                variables=variables,
            ),
        },
    )
    facts: dict[str, Any] = {name: facts_of(found) for name, found in sides.items()}
    mean = {name: facts[name]["step_seconds"]["mean"] for name in sides}
    cpu = {name: facts[name]["cpu_seconds_per_step"]["mean"] for name in sides}
    facts["ratio"] = mean["protected"] / mean["plain"]
    facts["cpu_seconds_more_per_role_and_step"] = (cpu["protected"] - cpu["plain"]) / size.roles
    return {**asdict(size), "roles": size.roles, "nodes": nodes, **facts}


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 2, "pairs of runs", 6)
    longer = at_least(0, float)
    parser.add_argument("--seconds", type=longer, default=3.0, metavar="S", help="a step, longer")
    args = parser.parse_args()

    def measured(base: Path) -> dict[str, Any]:
        return {
            "parameters": parameters(parse_args([f"@{CONFIG}"])),
            "seconds_longer": args.seconds,
            "warm_up_steps": WARM_UP,
            "sizes": [measure(size, args, base) for size in SIZES],
        }

    return run_bench("scaling", args.out, measured)


if __name__ == "__main__":
    sys.exit(main())
