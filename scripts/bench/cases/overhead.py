"""How much does protection cost a training run in which nothing fails?

Two nodes of two roles train (19.6 M parameters by default) with protection (deadpool run, buddy,
cadence 1) and without (stock gloo), in turns, A/B/A/B. Both report each step when it is done; the
time of a step is that between two reports, taken by this process. The first steps warm up; all
others count.

Read own_cpu_seconds_per_step first: the time of vaults, agents, coordinator, standby and launcher,
and of the threads of members that training does not have (thread_seconds_per_step of the JSON names
each). step_over_plain is the ratio of the pairs; on a machine whose cores training saturates, it is
processor time again, and as noisy as the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.frame import Facts, in_turns
from common.struck import SIZES, size_flags, sizes_of
from common.trainings import WARM_UP, parameters, row_of, run_plain, run_protected

MINUTES = 10
ROUNDS, STEPS = 4, 12
QUICK = ("--rounds", "1", "--steps", "2", "--tokens", "2048", "--size", "tiny")
TOKENS_PER_STEP = (8192, 2048)
NODES, NPROC_PER_NODE = 2, 2


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    sizes = TOKENS_PER_STEP
    parser.add_argument("--size", choices=SIZES, default="20M", help="of the model")
    parser.add_argument("--tokens", type=int, nargs="*", default=sizes, help="per step")


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run both sides in turns."""
    config, rows = sizes_of(args.size), []
    for tokens in args.tokens:
        training = [
            *(*size_flags(*SIZES[args.size]), "--pipeline-model-parallel-size", "2"),
            *("--train-iters", str(WARM_UP + 1 + args.steps)),
            *("--global-batch-size", str(tokens // config.seq_length)),
        ]
        sides = in_turns(
            f"{tokens} tokens",
            args.rounds,
            {
                "plain": lambda _, t=training: run_plain(
                    t, NODES * NPROC_PER_NODE, args.steps, base
                ),
                "protected": lambda _, t=training: run_protected(
                    t, args.steps, base, NODES, NPROC_PER_NODE
                ),
            },
        )
        rows += [
            row_of("plain", sides["plain"], at=tokens),
            row_of("protected", sides["protected"], sides["plain"], at=tokens),
        ]
    return {"parameters": parameters(config), "at": "tokens per step", "rows": rows}
