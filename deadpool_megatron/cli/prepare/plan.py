"""Computes, from a file of numbers about a model and a cluster, the cost of protecting every
iteration: nodes, memory, traffic and time of a step. The code that places copies in a run also
places them here. Nothing is started or measured.

A plan that cannot hold is refused with one line that names the number to change.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, size, table
from deadpool_megatron.cli.run_result import ResultError, read_story
from deadpool_megatron.layout.schemes import format_scheme, losses_survived
from deadpool_megatron.observe.narration import count
from deadpool_megatron.observe.story import Story
from deadpool_megatron.planning import shards
from deadpool_megatron.planning.assessment import OVERHEAD_SHARE, SWAP_SECONDS, Assessment, assess
from deadpool_megatron.planning.availability import training_share
from deadpool_megatron.planning.megatron_args import ASSUMED, sections_of
from deadpool_megatron.planning.model_replicas import Workload, describe, sizes_of_command
from deadpool_megatron.planning.sections import SECTIONS, Plan, PlanError, read_plan
from deadpool_megatron.simulation import answer as simulated
from deadpool_megatron.simulation.job import Job

_EPILOGUE = """\
docs/planning.md explains each number, and the limits of the model.

keys of FILE (those without a default are required):
{keys}

examples:
  deadpool plan --args configs/megatron-lm/gpt-7b.args --nodes 8
  deadpool plan configs/65b.yaml --run runs/first
  deadpool plan configs/65b.yaml --set protection.copies=2 --set cluster.spares=4
  deadpool plan configs/65b.yaml --set protection.scheme=parity
  deadpool plan configs/65b.yaml --json

exit status: 0 it holds; 2 refused, or the file is wrong
"""
_MAX_SPARES = 3
_NODE_ROWS = (
    ("unique state", "unique_bytes"),
    ("own slots", "own_slots_bytes"),
    ("copies for others", "copies_bytes"),
    ("slots and copies", "memory_bytes"),
    ("out per iteration", "out_bytes_per_step"),
    ("in per iteration", "in_bytes_per_step"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = _EPILOGUE.format(keys="\n".join(_keys()))
    add_plan_arguments(parser)
    text = "a run that has measured steps and recoveries"
    parser.add_argument("--run", type=Path, metavar="DIR", help=text)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a plan."""
    add = parser.add_argument
    add("file", type=Path, nargs="?", metavar="FILE", help="the plan, YAML")
    text = "file of arguments of a Megatron-LM script: model, split and batch, unless FILE has"
    text += " them; without FILE, assumptions about the cluster, which are printed"
    add("--args", type=Path, metavar="ARGS", help=text)
    add("--nodes", type=int, metavar="N", help="with --args: nodes that train")
    text = "override a value of the file; may be repeated"
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)
    add("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the assessment; with ``--json`` a refusal is an object, too."""
    name = str(args.file or args.args)
    try:
        story = None if args.run is None else read_story(args.run)
        plan = read_plan(args.file, [*args.set, *_overrides(story)], arg_sections(args))
        try:
            assessment = assess(plan)
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from error
    except (PlanError, ResultError) as error:
        if args.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        raise CommandError(str(error)) from error
    swap, source = _swap(story)
    tokens = tokens_of(args)
    gpus = plan.cluster.nodes * plan.cluster.gpus_per_node, plan.cluster.gpus_per_node
    replicas = sizes_of_command(tokens, *gpus, plan.protection.scheme).replicas if tokens else ()
    shares = _training_shares(plan, replicas)
    if args.json:
        answer = {"ok": True, "file": name, **assessment.to_dict(), "swap_seconds": swap}
        print(json.dumps({**answer, "training_shares": shares}, allow_nan=False))
        return 0
    print("\n".join(_describe(name, assessment, f"{swap:.1f} s{source}")))
    if tokens:
        print(describe(tokens, *gpus, plan.protection.scheme))
    if shares:
        print("\n".join(_availability(plan, shares)))
    job = job_of(assessment, tokens, [])
    found = simulated.traces(job, 0.0, 30.0, [f"0 {n}" for n in range(max(2, 1000 // job.nodes))])
    rows = simulated.compare(job, found, 0.0)
    print("", *simulated.sentences(job, rows, found, 0.0), sep="\n")
    if args.file is None:
        assumed = ", ".join(f"{key} {value}" for key, value in ASSUMED.items())
        print(f"assumed of the cluster (--set cluster.KEY=VALUE): {assumed}")
    return 0


def tokens_of(args: argparse.Namespace) -> list[str]:
    """Return the words of the file of ``--args``, none without it."""
    return [] if args.args is None else args.args.read_text("utf-8").split()


def job_of(assessment: Assessment, tokens: list[str], assumed: list[str]) -> Job:
    """Return the job to simulate; ``assumed``: words NAME=VALUE. Raises CommandError, and
    SimulationError for an unknown name."""
    plan = assessment.plan
    per_node = plan.cluster.gpus_per_node
    sizes: Sequence[int] = Workload(plan.parallel.grid).possible(plan.parallel.dp, per_node)
    if tokens:
        gpus = plan.cluster.nodes * per_node
        sizes = sizes_of_command(tokens, gpus, per_node, plan.protection.scheme).replicas
    try:
        values = {name: float(value) for name, _, value in (a.partition("=") for a in assumed)}
    except ValueError as error:
        raise CommandError(f"--assume: {error}; give NAME=VALUE") from error
    return Job.of(assessment, sizes, values)


def arg_sections(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the sections of a plan that ``--args`` and ``--nodes`` give. Raises PlanError for a
    combination of options without a meaning, or if the file cannot be read."""
    if args.args is None and args.nodes is not None:
        raise PlanError("--nodes belongs to --args: a FILE has its own")
    if args.args is not None and args.nodes is not None:
        try:
            return sections_of(args.args.read_text("utf-8").split(), args.nodes)
        except (OSError, ValueError) as error:
            raise PlanError(f"{args.args}: {getattr(error, 'strerror', None) or error}") from error
    if args.file is None or args.args is not None:
        raise PlanError("give FILE, or --args ARGS with --nodes N, or all of them")
    return {}


def _overrides(story: Story | None) -> list[str]:
    """Return overrides with the median step time of the run, none without a run. Raises PlanError
    if the run has too few steps."""
    if story is None:
        return []
    if not (steps := story.step_seconds()):
        raise PlanError("the run of --run has no two steps one after the other")
    speeds = ("tflops_per_gpu", "efficiency", "tokens_per_step")
    median = statistics.median(steps)
    return [*(f"cluster.{key}=null" for key in speeds), f"cluster.step_seconds={median}"]


def _swap(story: Story | None) -> tuple[float, str]:
    """Return the seconds that a lost node costs, and a text if they were measured in the run."""
    failures = () if story is None else story.failures
    if seconds := [each.seconds for each in failures if each.seconds and not each.planned]:
        return statistics.median(seconds), " in the run"
    return SWAP_SECONDS, ""


def _training_shares(plan: Plan, replicas: Sequence[int]) -> list[list[float]]:
    """Return for each number of spares two shares of node hours that train: for a run that needs
    all model replicas, and for a run that can continue with each number in ``replicas``. Return
    nothing for a single number of replicas."""
    cluster = plan.cluster
    live_share = cluster.failure_hours / (cluster.failure_hours + cluster.repair_hours)
    return [
        [
            training_share(numbers, cluster.nodes, spares, live_share)
            for numbers in (replicas[-1:], replicas)
        ]
        for spares in range(_MAX_SPARES + 1 if len(replicas) > 1 else 0)
    ]


def _availability(plan: Plan, shares: list[list[float]]) -> list[str]:
    hours = f"{plan.cluster.failure_hours:g} h, and is back after {plan.cluster.repair_hours:g} h"
    rows = [(str(n), *(f"{share:.3f}" for share in pair)) for n, pair in enumerate(shares)]
    return [
        "",
        f"Share of the hours of all nodes that train, if each fails every {hours}",
        *table(("spares", "full number only", "elastic"), rows),
    ]


def _describe(name: str, assessment: Assessment, swap: str) -> list[str]:
    memory = [(title, *map(size, assessment.busiest(field))) for title, field in _NODE_ROWS]
    return [
        *_headline(name, assessment),
        "",
        "Memory and traffic of a node",
        *table(("", "mean", "largest"), memory),
        "",
        "One iteration",
        *_time_table(assessment),
        f"  measured with gloo on CPUs (README.md): an iteration takes {OVERHEAD_SHARE:.0%} more, a"
        f" lost node {swap}",
        "",
        f"verdict: {assessment.verdict()}",
    ]


def _headline(name: str, assessment: Assessment) -> list[str]:
    plan, placement = assessment.plan, assessment.placement
    parallel, cluster, protection = plan.parallel, plan.cluster, plan.protection
    sizes = (("tp", parallel.tp), ("cp", parallel.cp), ("ep", parallel.ep), ("pp", parallel.pp))
    split = "".join(f"{key} {value} x " for key, value in sizes if value > 1)
    domains = len(set(placement.topology.domains.values()))
    survived = count(losses_survived(shards.settings_of(plan)), "lost node")
    scheme = format_scheme(shards.protection_plan(plan).scheme)
    return [
        f"{name}: {shards.total_parameters(plan.model) / 1e9:.1f} B parameters,"
        f" {len(placement.roles)} roles ({split}dp {parallel.dp})",
        f"  {count(cluster.nodes, 'node')} of {count(cluster.gpus_per_node, 'GPU')},"
        f" {count(cluster.spares, 'spare')}, {count(domains, 'failure domain')}",
        f"  {scheme} for {survived}, every {count(protection.cadence, 'iteration')}, lag"
        f" {protection.max_lag}, {shards.slots_of(plan)} slots",
    ]


def _time_table(assessment: Assessment) -> list[str]:
    times, steps = assessment.timing, assessment.lost_steps
    rows = [
        ("copy to host memory (PCIe)", times.copy_seconds),
        ("checksum", times.checksum_seconds),
        ("ship (network)", times.ship_seconds),
        ("ship at its pace", times.paced_ship_seconds),
        ("commit", times.commit_seconds),
        ("window", times.window_seconds),
        ("iteration", times.step_seconds),
    ]
    cells = [(title, f"{value:.3f}", f"{value / times.step_seconds:.1%}") for title, value in rows]
    return [
        *table(("", "seconds", "of the iteration"), cells),
        f"  RPO: at most {count(steps, 'iteration')}, {steps * times.step_seconds:.1f} s, computed"
        " again after a loss",
    ]


def _keys() -> list[str]:
    lines = []
    for section, cls in SECTIONS.items():
        lines.append(f"  {section}: {(cls.__doc__ or '').splitlines()[0]}")
        for entry in dataclasses.fields(cls):
            default = entry.default
            has_default = default is not dataclasses.MISSING and default is not None
            text = f" (default: {str(default).lower()})" if has_default else ""
            lines.append(f"    {entry.name:<26} {entry.metadata['help']}{text}")
    return lines
