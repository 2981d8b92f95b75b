"""How do other systems that users have today fare with the same model, machine and failure?

    bench.py peers --install             # once; downloads the peers into environments of their own

Four roles (PP2 x DP2, distributed optimizer) on gloo. In each round the same training runs without
any protection and undisturbed, then once per side, where one process is killed in a backward pass
after the measured steps; on sides that end in ``-node``, where each node has a launcher of its own
and there is one for a spare, with all that its node runs. Per side:

  own_cpu_seconds_per_step   of all processes, less those of the undisturbed run of the round:
                             protection, helpers of restarts and slower steps
  step_over_plain            step time before the kill over that of the undisturbed runs
  seconds_to_new_step        from the kill to the end of the first step that is new
  seconds_lost               lost in all, if steps take as long as before the kill
  steps_recomputed           finished steps that were computed again

Losses and final states of each run are compared with those of the undisturbed run, bit by bit. A
run that fails is listed with its reason, and so is a peer that cannot be run here. The exit status
is 1 only if a side of deadpool failed or differs: the outcome of a peer is a finding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from common.figures import row
from common.frame import BenchError, Facts, UsageError, in_turns
from common.outcomes import first_difference, seconds_of
from common.struck import NODES, SIZES, TOKENS, iterations, sizes_of, struck_iteration
from common.trainings import WARM_UP, Measured, parameters, row_of
from other_systems.environments import PACKAGES, check, install
from other_systems.sides import NOT_RUN, SIDES, Side, run_side, run_undisturbed

MINUTES = 40
ROUNDS, STEPS = 2, 10
QUICK = (
    *("--rounds", "1", "--steps", "2", "--size", "tiny"),
    *("--side", "torchrun-sync-1", "deadpool-process"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    parser.add_argument("--size", choices=SIZES, nargs="*", default=["5M"])
    parser.add_argument(
        *("--side",),
        choices=SIDES,
        nargs="*",
        default=list(SIDES),
        metavar="NAME",
        help=", ".join(SIDES),
    )
    text = "first make environments for the peers with pip, in ~/.cache/deadpool-megatron/peers"
    parser.add_argument("--install", action="store_true", help=text)


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run all sides of each size in turns."""
    sides, reasons = available(args)
    facts: Facts = {
        "roles": NODES,
        "tokens_per_step": TOKENS,
        "warm_up_steps": WARM_UP,
        "rows": [],
        "killed_in_iteration": struck_iteration(args.steps),
        "iterations": iterations(args.steps),
        "sides": {label: vars(side) for label, side in sides.items()},
        "not_run": reasons,
        "failed": {},
        "differs": {},
        "wrong": [],
    }
    for name in args.size:
        takes = {"undisturbed": lambda _, n=name: run_undisturbed(n, args.steps, base)}
        takes |= {label: partial(_take, side, name, args, base) for label, side in sides.items()}
        runs = in_turns(name, args.rounds, takes)
        plain: list[Measured] = runs.pop("undisturbed")
        count = parameters(sizes_of(name))
        facts["rows"].append(row_of("undisturbed", plain, at=count))
        for label, found in runs.items():
            failed = [str(run) for run in found if isinstance(run, BenchError)]
            differs = [_difference(run, plain[0]) for run in found if isinstance(run, Measured)]
            facts["failed"][f"{label}, {name}"] = failed
            facts["differs"][f"{label}, {name}"] = differs
            if sides[label].start == "deadpool" and (failed or any(differs)):
                facts["wrong"].append(f"{label}, {name}: {failed or differs}")
            facts["rows"].append(_row(label, found, plain, count))
    return facts


def _take(
    side: Side, name: str, args: argparse.Namespace, base: Path, _: int
) -> Measured | BenchError:
    with tempfile.TemporaryDirectory(dir=base) as directory:
        try:
            return run_side(side, name, args.steps, Path(directory))
        except BenchError as error:
            print(error, file=sys.stderr)
            return error


def _row(label: str, found: list[Measured | BenchError], plain: list[Measured], at: int) -> Facts:
    """Return the row of a side. The plain run of a round in which it failed does not count."""
    pairs = [(a, b) for a, b in zip(plain, found, strict=True) if isinstance(b, Measured)]
    costs = [seconds_of(b.reports, b.killed_at or 0.0, b.mean_seconds) for _, b in pairs]
    again = [
        c[2] if b.recomputed is None else b.recomputed
        for c, (_, b) in zip(costs, pairs, strict=True)
    ]
    values = {
        "own_cpu_seconds_per_step": [
            b.cpu_seconds_per_step - a.cpu_seconds_per_step for a, b in pairs
        ],
        "step_seconds": [seconds for _, run in pairs for seconds in run.step_seconds],
        "seconds_to_new_step": [cost[0] for cost in costs],
        "seconds_lost": [cost[1] for cost in costs],
        "steps_recomputed": again,
    }
    return row(
        label, values, {"step_over_plain": [b.mean_seconds / a.mean_seconds for a, b in pairs]}, at
    )


def _difference(run: Measured, undisturbed: Measured) -> str | None:
    """Return where a run differs from the undisturbed run, in a loss or at the end; or None."""
    expected = {report.iteration: report.loss for report in undisturbed.reports}
    found = first_difference(run.reports, expected)
    return "final state" if found is None and run.hashes != undisturbed.hashes else found


def available(args: argparse.Namespace) -> tuple[dict[str, Side], dict[str, str]]:
    """Return the sides that can be run, and for all others the reason. Raises UsageError when a
    peer cannot be installed."""
    try:
        for peer in PACKAGES if args.install else ():
            install(peer)
    except BenchError as error:
        raise UsageError(str(error)) from error
    sides: dict[str, Side] = {}
    reasons = dict(NOT_RUN)
    for label, side in SIDES.items():
        if label not in args.side:
            reasons[label] = "not asked for"
            continue
        try:
            if side.peer:
                check(side.peer)
            sides[label] = side
        except BenchError as error:
            reasons[label] = str(error)
            print(f"{label}: not run: {error}", file=sys.stderr)
    return sides, reasons
