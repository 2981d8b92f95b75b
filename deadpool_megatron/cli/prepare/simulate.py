"""Simulates months of a planned run with its failures, and compares ways to recover on the same
failures. Nothing is started or measured. Results depend on constants, of which some are assumed:
--list shows each with its source; --plot and --json show the results over their ranges.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, table
from deadpool_megatron.cli.prepare.plan import add_plan_arguments, arg_sections, job_of, tokens_of
from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.sections import read_plan
from deadpool_megatron.simulation import answer, exact, hazards
from deadpool_megatron.simulation.job import Job
from deadpool_megatron.simulation.run import Outcome

_EPILOGUE = """\
docs/planning.md explains the model, and how far it was compared with measurements.

examples:
  deadpool simulate configs/65b.yaml --plot months.png
  deadpool simulate configs/65b.yaml --rates rsc-1 --assume rebuild=30 --json
  deadpool simulate configs/65b.yaml --rates failures.jsonl

exit status: 0 done; 2 refused, or a file is wrong
"""
_HEADS = (
    "",
    "ETTR",
    "per node bought",
    "recovery p50",
    "p95",
    "lost p95",
    "waits",
    "smaller",
    "ends",
)
#: curve -> label of its axis
_AXES = {
    "gpus": "GPUs",
    "rebuild": "seconds to rebuild communicators of a small run",
    "overhead": "overhead of protection",
    "spares": "spares",
    "large": "seconds to rebuild all communicators of 16,384 GPUs",
    "survival": "GPUs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = _EPILOGUE
    add_plan_arguments(parser)
    add, names = parser.add_argument, ", ".join(hazards.RATES)
    text = f"failures: of the plan (cluster.failure_hours), of {names}, or of a log, JSON lines"
    add("--rates", default="plan", metavar="NAME|FILE", help=text)
    add("--days", type=float, default=30.0, help="length of a run (default: 30)")
    add("--seeds", type=int, default=100, help="number of runs (default: 100)")
    add("--seed", default="0", help="text from which all draws follow (default: 0)")
    text = "another value of a constant; may be repeated"
    add("--assume", action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--exact", action="store_true", help="the table by the coordinator itself; says how long")
    add("--list", action="store_true", help="show all constants with their sources, and end")
    add("--plot", type=Path, metavar="FILE", help="draw the curves (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    if args.list:
        heads = ("constant", "value", "lowest", "highest", "is", "source")
        print("\n".join(table(heads, [(n, *map(str, c)) for n, c in hazards.CONSTANTS.items()])))
        return 0
    assessment = assess(read_plan(args.file, args.set, arg_sections(args)))
    job = job_of(assessment, tokens_of(args), args.assume)
    seeds = [f"{args.seed} {number}" for number in range(max(1, args.seeds))]
    rate = hazards.RATES.get(args.rates, 0.0)
    if args.rates == "plan" or rate:
        found = answer.traces(job, rate, args.days, seeds)
    else:
        found = [hazards.read_log(Path(args.rates), job.machines)]
    rows = answer.compare(job, found, rate)
    result: dict[str, Any] = {"seed": args.seed, "policies": rows}
    result["words"] = [*answer.sentences(job, rows, found, rate)]
    if args.exact:
        minutes = sum(exact.seconds_of(job, trace) for trace in found) / 60
        print(f"about {minutes:.1f} minutes of one processor", file=sys.stderr, flush=True)
        advance = _bar(len(rows) * len(found))

        def play(*of: Any) -> Outcome:
            outcome = exact.simulate(*of)
            advance()
            return outcome

        result["policies"] = answer.compare(job, found, rate, play)
    if args.json or args.plot:
        progress = _bar(answer.STEPS)
        result["curves"] = answer.curves(job, rate, args.days, seeds[:20], progress)
    if args.plot:
        _draw(args.plot, result["curves"])
    print(json.dumps(result, sort_keys=True) if args.json else "\n".join(_describe(job, result)))
    return 0


def _bar(total: int) -> Callable[[], None]:
    """Return what to call after each of ``total`` parts of a work, to show its progress."""
    done = itertools.count(1)

    def advance() -> None:
        parts = 40 * next(done) // total
        if sys.stderr.isatty():
            print(f"\r[{'#' * parts:40}]", end="", file=sys.stderr, flush=True)

    return advance


def _describe(job: Job, result: dict[str, Any]) -> list[str]:
    cells = [
        (
            *(name, f"{row['ettr']:.4f} ± {row['ettr_interval']:.4f}", f"{row['goodput']:.4f}"),
            *(f"{row['recovery_seconds'].get(place, 0):,.0f}" for place in ("p50", "p95")),
            f"{row['lost_seconds'].get('p95', 0):,.0f}",
            *(f"{row['waited_share']:.2%}", f"{row['reduced_share']:.2%}"),
            "; ".join(f"{count} x {end}" for end, count in row["ends"].items()),
        )
        for name, row in result["policies"].items()
    ]
    text = f"{job.gpus} GPUs on {job.nodes} nodes, {job.spares} spares; a hot swap takes"
    text += f" {job.swap(hazards.NODE):.0f} s, {job.rebuild(job.nodes):.0f} s of it to rebuild"
    return [f"{text} communicators (--list)", *table(_HEADS, cells), "", *result["words"]]


def _draw(path: Path, curves: dict[str, Any]) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise CommandError(f"a plot needs matplotlib: pip install matplotlib ({error})") from error
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    for axis, (name, label) in zip(axes.flat, _AXES.items(), strict=True):
        rows = curves[name]
        for line in next(iter(rows.values())):
            axis.plot([*rows], [row[line] for row in rows.values()], marker=".", label=line)
        axis.set_xlabel(label)
        axis.set_ylabel("no state is lost in days" if name == "survival" else "useful share")
        axis.set_xscale("linear" if name in ("spares", "overhead") else "log")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7)
    figure.savefig(path)
    pyplot.close(figure)
