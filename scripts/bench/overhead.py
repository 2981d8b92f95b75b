#!/usr/bin/env python
"""The cost of protection without failures: step time with it over step time without it.

    .venv/bin/python scripts/bench/overhead.py [--rounds N] [--steps N] [--out FILE]

A GPT of about 20 M parameters trains at 8,192 tokens per step and at a quarter of that, without
protection (stock gloo) and with it, in turns: A/B/A/B. Both report each step when it is done; the
time of a step is that between two reports, taken by this process. The first steps of a run warm up
and are not measured; all others count. Other figures: seconds waited at the commit gate, CPU
seconds per step (in all, and by process and thread), bytes shipped per parameter and step, memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from common.command import in_turns, parser_of, run_bench
from common.machine import ROOT
from common.trainings import WARM_UP, Measured, parameters, run_plain, run_protected

from deadpool_megatron.observe.steps import summary
from deadpool_megatron.trainer.config import TrainerConfig, parse_args

CONFIG = ROOT / "configs" / "20m.args"
TOKENS_PER_STEP = (8192, 2048)
NODES, NPROC_PER_NODE = 2, 2
_MIN_SHOWN_SECONDS = 0.001


def model() -> TrainerConfig:
    """Return the sizes in the configuration file."""
    return parse_args([f"@{CONFIG}", "--lr-warmup-iters", "1"])


def training_arguments(tokens: int, steps: int) -> list[str]:
    """Return the trainer's flags, the same with and without protection."""
    samples = tokens // model().seq_length
    return [
        *(f"@{CONFIG}", "--lr-warmup-iters", "1", "--log-interval", "1"),
        *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--global-batch-size", str(samples)),
        *("--train-iters", str(WARM_UP + 1 + steps)),
    ]


def measure(tokens: int, rounds: int, steps: int, base: Path) -> dict[str, Any]:
    """Run both sides in turns, and return the ratios between them."""
    training = training_arguments(tokens, steps)
    sides = in_turns(
        f"{tokens} tokens",
        rounds,
        {
            "plain": lambda _: run_plain(training, NODES * NPROC_PER_NODE, steps, base),
            "protected": lambda _: run_protected(training, steps, base, NODES, NPROC_PER_NODE),
        },
    )
    facts: dict[str, Any] = {name: facts_of(found) for name, found in sides.items()}
    facts |= ratios_of(sides["plain"], sides["protected"])
    shipped = facts["protected"]["shipped_bytes_per_step"]
    facts["shipped_bytes_per_parameter_and_step"] = (
        None if shipped is None else shipped / parameters(model())
    )
    return facts


def ratios_of(plain: list[Measured], protected: list[Measured]) -> dict[str, Any]:
    """Return the step time with protection over that without, of all runs and of each pair."""

    def of_steps(runs: list[Measured]) -> dict[str, float]:
        return summary([seconds for run in runs for seconds in run.step_seconds])

    below, above = of_steps(plain), of_steps(protected)
    return {
        "ratio": {key: above[key] / below[key] for key in ("mean", "p50", "p95", "p99")},
        "ratio_of_each_pair": [
            of_steps([b])["mean"] / of_steps([a])["mean"]
            for a, b in zip(plain, protected, strict=True)
        ],
    }


def facts_of(runs: list[Measured]) -> dict[str, Any]:
    """Return the facts of a side: all its runs taken together, and every single value."""
    everything = [seconds for run in runs for seconds in run.step_seconds]
    shipped = [r.shipped_bytes_per_step for r in runs if r.shipped_bytes_per_step is not None]
    gate = [run.gate_seconds for run in runs if run.gate_seconds is not None]
    return {
        "step_seconds": summary(everything),
        "cpu_seconds_per_step": summary([run.cpu_seconds_per_step for run in runs]),
        "thread_seconds_per_step": _mean_of_threads(runs),
        "memory_bytes": summary([float(run.memory_bytes) for run in runs]),
        "gate_seconds": sum(gate) if gate else None,
        "gate_waits": sum(run.gate_waits or 0 for run in runs),
        "shipped_bytes_per_step": sum(shipped) / len(shipped) if shipped else None,
        "runs": [run.step_seconds for run in runs],
    }


def _mean_of_threads(runs: list[Measured]) -> dict[str, float]:
    """Return the mean of each thread, largest first, from a millisecond per step on."""
    total = sum((run.thread_seconds_per_step for run in runs), Counter[str]())
    return {
        name: seconds / len(runs)
        for name, seconds in total.most_common()
        if seconds / len(runs) >= _MIN_SHOWN_SECONDS
    }


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 2, "pairs of runs", 12)
    sizes = TOKENS_PER_STEP
    parser.add_argument(
        "--tokens", type=int, choices=sizes, nargs="*", default=sizes, help="per step"
    )
    args = parser.parse_args()

    def measured(base: Path) -> dict[str, Any]:
        roles = NODES * NPROC_PER_NODE
        return {
            "model": {"parameters": parameters(model()), "roles": roles, "nodes": NODES},
            "warm_up_steps": WARM_UP,
            "tokens_per_step": {
                str(tokens): measure(tokens, args.rounds, args.steps, base)
                for tokens in args.tokens
            },
        }

    return run_bench("overhead", args.out, measured)


if __name__ == "__main__":
    sys.exit(main())
