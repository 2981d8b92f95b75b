"""How much does protection cost a training run in which nothing fails?

Two nodes of two roles train (19.6 M parameters by default) with protection (deadpool run, buddy,
cadence 1) and without (stock gloo), in turns, A/B/A/B. Both report each step when it is done; the
time of a step is that between two reports, taken by this process. The first steps warm up; all
others count. --other adds runs under torchrun, whose ranks are not forked, so that they need more
memory: torchrun saves nothing; torchrun-sync-N (torch.distributed.checkpoint), torchrun-async-N and
lm-resiliency-N each N steps, N being 1, 2, 5, 10 or 50. --pretrain trains with a user's script, on
a blend of two texts; each of its ranks has two loader workers, and each run builds its index.

Read own_cpu_seconds_per_step first: the time of vaults, agents, coordinator, standby and launcher,
and of the threads of members that training does not have (thread_seconds_per_step of the JSON names
each); of --other, all that is more than without protection. step_over_plain is the ratio of the
pairs; on a machine whose cores training saturates, it is processor time again, and as noisy as the
machine. memory_bytes is the most that was seen in the first steps.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.frame import Facts, in_turns
from common.struck import SIZES, size_flags, sizes_of
from common.trainings import WARM_UP, Measured, parameters, row_of, run_plain, run_protected
from other_systems.sides import OTHERS, run_other

from deadpool_megatron.trainer.config import parse_args
from tests.megatron_lm.harness import blend

MINUTES = 10
ROUNDS, STEPS = 4, 12
QUICK = ("--rounds", "1", "--tokens", "2048", "--size", "tiny", "--other", "torchrun-async-1")
TOKENS_PER_STEP = (8192, 2048)
NODES, PIPELINE = 2, 2


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    sizes, many = TOKENS_PER_STEP, {"nargs": "*", "metavar": "N"}
    parser.add_argument("--size", choices=SIZES, default="20M", help="of the model")
    parser.add_argument("--tokens", type=int, default=sizes, help="per step", **many)
    parser.add_argument("--data-parallel", type=int, default=[2], help="degree", **many)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--other", choices=OTHERS, nargs="*", default=[], metavar="NAME")
    text = "train with pretrain_gpt.py of this Megatron-LM, on a blend with an index and workers"
    either.add_argument("--pretrain", type=Path, metavar="DIR", help=text)


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run all sides in turns."""
    config, rows = sizes_of(args.size), []
    for tokens, degree in itertools.product(args.tokens, args.data_parallel):
        training = [
            *(*size_flags(*SIZES[args.size]), "--pipeline-model-parallel-size", str(PIPELINE)),
            *("--train-iters", str(WARM_UP + 1 + args.steps)),
            *("--global-batch-size", str(tokens // config.seq_length)),
        ]
        run = partial(_run, training, degree * PIPELINE, args.steps, base)
        if args.pretrain:
            run = partial(_pretrain, training, degree * PIPELINE, args, base)
        takes = {name: partial(run, name) for name in ("plain", "protected", *args.other)}
        sides = in_turns(f"{tokens} tokens, degree {degree}", args.rounds, takes)
        for name, found in sides.items():
            plain = sides["plain"] if name != "plain" else []
            rows.append(row_of(f"{name}, {tokens} tokens", found, plain, degree))
    return {"parameters": parameters(config), "at": "data-parallel degree", "rows": rows}


def _pretrain(
    training: Sequence[str], ranks: int, args: argparse.Namespace, base: Path, name: str, turn: int
) -> Measured:
    # A step more than is measured: a rank of the script ends right after its last step.
    config = replace(parsed := parse_args(training), train_iters=parsed.train_iters + 1)
    flags, more = blend.arguments(base / f"{name}{turn}", config), {"unmeasured_steps": 1}
    if name == "plain":
        command, variables = blend.plain(args.pretrain, ranks, flags)
        more |= {"variables": variables, "command": command}
        return run_plain((), ranks, args.steps, base, **more)
    size = (NODES, ranks // NODES)
    program = [str(args.pretrain / "pretrain_gpt.py")]
    return run_protected([*flags, "--deadpool"], args.steps, base, *size, program=program, **more)


def _run(
    training: Sequence[str], ranks: int, steps: int, base: Path, name: str, _: int
) -> Measured:
    if name == "plain":
        return run_plain(training, ranks, steps, base)
    if name == "protected":
        return run_protected(training, steps, base, NODES, ranks // NODES)
    return run_other(OTHERS[name], training, ranks, steps, base)
