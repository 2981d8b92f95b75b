#!/usr/bin/env python
"""What protection costs as a run grows: 4, 8 and 16 roles, 2 to 8 data-parallel peers.

    .venv/bin/python scripts/bench/scaling.py [--rounds N] [--steps N] [--seconds S] [--out FILE]

A GPT of about 5 M parameters trains without protection (stock gloo) and with it, in turns. Each
step takes ``--seconds`` longer, in which nobody needs a processor, as if a device computed: on few
cores the processes of many roles would take the cores from each other, and nothing else would be
seen. Of the measured steps none is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.machine import ROOT, machine_facts, write_facts
from common.slow_steps import VARIABLE
from common.trainings import WARM_UP, BenchError, Measured, parameters, run_plain
from overhead import facts_of, run_protected

from deadpool_megatron.trainer.arguments import parse_args

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
    """Flags of the trainer, the same with and without protection."""
    return [
        *(f"@{CONFIG}", "--lr-warmup-iters", "1", "--log-interval", "1"),
        *("--tensor-model-parallel-size", str(size.tensor)),
        *("--pipeline-model-parallel-size", str(size.pipeline)),
        *("--use-distributed-optimizer", "--train-iters", str(WARM_UP + 1 + steps)),
    ]


def measure(size: Size, args: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Both sides in turns, and the ratio between them."""
    training = training_arguments(size, args.steps)
    variables = {VARIABLE: str(args.seconds)}
    nodes = size.roles // NPROC_PER_NODE
    sides: dict[str, list[Measured]] = {"plain": [], "protected": []}
    for number in range(1, args.rounds + 1):
        for name, runs in sides.items():
            print(f"{size}, {name}, {number} of {args.rounds}", file=sys.stderr, flush=True)
            if name == "plain":
                found = run_plain(training, size.roles, args.steps, base, variables=variables)
            else:
                program = [str(_SLOW_STEPS), "protected"]
                found = run_protected(
                    training, args.steps, base, nodes, NPROC_PER_NODE, program, variables
                )
            runs.append(found)
    facts: dict[str, Any] = {name: facts_of(found) for name, found in sides.items()}
    mean = {name: facts[name]["step_seconds"]["mean"] for name in sides}
    cpu = {name: facts[name]["cpu_seconds_per_step"]["mean"] for name in sides}
    facts["ratio"] = mean["protected"] / mean["plain"]
    facts["cpu_seconds_more_per_role_and_step"] = (cpu["protected"] - cpu["plain"]) / size.roles
    return {**asdict(size), "roles": size.roles, "nodes": nodes, **facts}


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="pairs of runs")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="measured per run")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="a step, longer")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2 or args.seconds < 0:
        parser.error("--rounds must be at least 1, --steps at least 2, --seconds not negative")
    facts: dict[str, Any] = {
        "bench": "scaling",
        "machine": machine_facts(),
        "parameters": parameters(parse_args([f"@{CONFIG}"])),
        "seconds_longer": args.seconds,
        "warm_up_steps": WARM_UP,
        "sizes": [],
    }
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as base:
        for size in SIZES:
            try:
                facts["sizes"].append(measure(size, args, Path(base)))
            except BenchError as error:
                print(f"scaling bench: {error}", file=sys.stderr)
                return 1
    write_facts(args.out, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
