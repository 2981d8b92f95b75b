"""Simulates months of a planned run with its failures, and compares ways to recover on the same
failures. Nothing is started or measured. Results depend on constants, of which some are assumed:
--list shows each with its source; --plot and --json show the results over their ranges.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, table
from deadpool_megatron.cli.prepare.plan import add_plan_arguments, arg_sections, tokens_of
from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.model_replicas import Workload, sizes_of_command
from deadpool_megatron.planning.sections import Plan, read_plan
from deadpool_megatron.settings import SchemeKind
from deadpool_megatron.simulation import answer, hazards
from deadpool_megatron.simulation.exact import Exact
from deadpool_megatron.simulation.job import Job
from deadpool_megatron.simulation.run import Outcome, Policy, simulate

_EPILOGUE = """\
docs/simulate.md explains the model, and how far it was compared with measurements.

examples:
  deadpool simulate configs/65b.yaml --plot months.png
  deadpool simulate configs/65b.yaml --rates rsc-1 --assume rebuild=30
  deadpool simulate --args configs/megatron-lm/gpt-65b.args --nodes 64 --json
  deadpool simulate configs/65b.yaml --rates failures.jsonl

exit status: 0 done; 2 refused, or a file is wrong
"""


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
    add("--list", action="store_true", help="show all constants with their sources, and end")
    text = "have the coordinator's own code decide; shows first how long that takes"
    add("--exact", action="store_true", help=text)
    add("--plot", type=Path, metavar="FILE", help="draw the curves (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    if args.list:
        cells = [
            (name, f"{value:g}", f"{low:g} to {high:g}", mark, source)
            for name, (value, low, high, mark, source) in hazards.CONSTANTS.items()
        ]
        print("\n".join(table(("constant", "value", "range", "is", "source"), cells)))
        return 0
    plan = read_plan(args.file, args.set, arg_sections(args))
    job = job_of(plan, tokens_of(args), args.assume)
    seeds = [f"{args.seed} {number}" for number in range(max(1, args.seeds))]
    rate = hazards.RATES.get(args.rates, 0.0)
    if args.rates == "plan" or rate:
        found = answer.traces(job, rate, args.days, seeds)
    else:
        found = [hazards.read_log(Path(args.rates), job.machines)]
    runner = _exact_runner(plan, job, found) if args.exact else simulate
    rows = answer.compare(job, found, rate, runner)
    result = {"seed": args.seed, "days": found[0].seconds / hazards.DAY, "policies": rows}
    if args.json or args.plot:
        result["curves"] = answer.curves(job, rate, args.days, seeds[:20])
    if args.plot:
        draw(args.plot, result)
    if args.json:
        print(json.dumps(result, sort_keys=True))
    else:
        print("\n".join(_describe(job, result)))
    return 0


def job_of(plan: Plan, tokens: list[str], assumed: list[str]) -> Job:
    """Return the job of a plan. Raises PlanError, SimulationError and CommandError."""
    cluster = plan.cluster
    gpus = cluster.nodes * cluster.gpus_per_node, cluster.gpus_per_node
    sizes = Workload(plan.parallel.grid).possible(plan.parallel.dp, cluster.gpus_per_node)
    if tokens:
        sizes = sizes_of_command(tokens, *gpus, plan.protection.scheme).replicas
    try:
        values = {name: float(value) for name, _, value in (a.partition("=") for a in assumed)}
    except ValueError as error:
        raise CommandError(f"--assume: {error}; give NAME=VALUE") from error
    return Job.of(assess(plan), sizes, values)


def _exact_runner(plan: Plan, job: Job, found: list[hazards.Trace]) -> answer.Runner:
    """Return a runner that has the machine decide on hot swaps; print how long it will take."""
    if (plan.protection.scheme, plan.protection.cadence) != (SchemeKind.BUDDY, 1):
        raise CommandError("--exact: only for protection.scheme=buddy and protection.cadence=1")
    gc.disable()  # it would look at all agents again and again
    failures = sum(len(trace.failures) for trace in found)
    seconds = 2 * (failures * 1e-3 * job.nodes + len(found) * 1.5e-5 * job.nodes**2)
    print(f"about {seconds / 60:.1f} minutes of one processor", file=sys.stderr)

    def runner(job: Job, policy: Policy, trace: hazards.Trace, seed: str) -> Outcome:
        if not policy.is_hot or policy.interval != job.timing.step_seconds:
            return simulate(job, policy, trace, seed)
        if sys.stderr.isatty():
            done = found.index(trace) + 1
            print(
                f"\r{policy.name:20} [{'#' * (40 * done // len(found)):40}]",
                end="",
                file=sys.stderr,
            )
        gc.collect()
        return Exact(plan, job, trace, seed, elastic=bool(policy.change)).play()

    return runner


def _describe(job: Job, result: dict[str, Any]) -> list[str]:
    rows, days = result["policies"], result["days"]
    cells = [
        (
            *(name, f"{row['ettr']:.4f} ± {row['ettr_interval']:.4f}", f"{row['goodput']:.4f}"),
            *(f"{row['recovery_seconds'].get(place, 0):,.0f}" for place in ("p50", "p95")),
            f"{row['lost_seconds'].get('p95', 0):,.0f}",
            *(f"{row['waited_share']:.2%}", f"{row['reduced_share']:.2%}"),
            "; ".join(f"{count} x {end}" for end, count in row["ends"].items()),
        )
        for name, row in rows.items()
    ]
    heads = (
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
    swap, rebuild = job.swap(hazards.NODE), job.rebuild(job.nodes)
    return [
        f"{job.gpus} GPUs on {job.nodes} nodes, {job.spares} spares; {days:.0f} days,"
        f" {next(iter(rows.values()))['interruptions']:.1f} interruptions; a hot swap takes"
        f" {swap:.0f} s, {rebuild:.0f} s of it to rebuild communicators",
        *table(heads, cells),
        *words(job, rows, days),
    ]


def words(job: Job, rows: dict[str, Any], days: float) -> list[str]:
    """Return the answer in words."""
    hours = job.machines * job.plan.cluster.gpus_per_node * 24 * days

    def worth(name: str, other: str) -> str:
        return f"{(rows[name]['goodput'] - rows[other]['goodput']) * hours:+,.0f} GPU-hours"

    overhead, mtbf = answer.break_even(job)
    best = round(rows["the same, best cadence"]["save_interval_seconds"] / job.timing.step_seconds)
    return [
        "",
        f"In {days:.0f} days a hot swap is worth {worth('hot swap', 'restart, async')} over"
        f" restarts from checkpoints, {worth('hot swap', 'in-job restart')} over restarts in the"
        f" job; elasticity adds {worth('hot swap, elastic', 'hot swap')}.",
        f"Protection of each step is taken to cost {job.values['overhead']:.1%}. Against restarts in"
        f" the job that pays below {overhead:.2%}, or if the run fails more often than each"
        f" {mtbf / hazards.HOUR:,.1f} h;",
        f"protecting each {best}. step adds"
        f" {worth('the same, best cadence', 'hot swap, elastic')}.",
    ]


def draw(path: Path, result: dict[str, Any]) -> None:
    """Write the picture of the curves. Raises CommandError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise CommandError(f"a plot needs matplotlib: pip install matplotlib ({error})") from error
    curves = result["curves"]
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    shown = ("gpus", "rebuild", "overhead", "spares", "start", "survival")
    labels = ["GPUs", "seconds to rebuild communicators of a small run", "overhead of protection"]
    labels += ["spares", "seconds to start a process", "GPUs"]
    for axis, name, label in zip(axes.flat, shown, labels, strict=True):
        table = curves[name]
        for line in next(iter(table.values())):
            title = f"{line} days" if name == "survival" else line
            axis.plot([*table], [row[line] for row in table.values()], marker=".", label=title)
        axis.set_xlabel(label)
        axis.set_ylabel("no state is lost" if name == "survival" else "useful share of the time")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7)
        if name in ("gpus", "survival", "rebuild", "start"):
            axis.set_xscale("log")
    figure.savefig(path)
    pyplot.close(figure)
