"""``deadpool plan FILE``: will it hold? Nodes, memory and traffic before a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, size, table
from deadpool_megatron.observe.narration import count
from deadpool_megatron.planning.answer import Assessment, assess
from deadpool_megatron.planning.plan_file import SECTIONS, PlanError, read_plan
from deadpool_megatron.planning.sizes import total_parameters

_DESCRIPTION = """\
Works out, from a file of numbers about a model and a cluster, what protection of every
iteration needs: nodes, memory, traffic and the time of a step that is left for it. Copies are
placed by the code that places them in a run. Nothing is started or measured.

A plan that cannot hold is refused with one line: the number to change.
"""
_EPILOGUE = """\
formulas (docs/planning.md explains each, and what is left out):
  unique state    12 bytes per parameter of a role's shard, and the extras
  memory          (2 or 3, + max_lag) slots per role, and as many for each copy held
  window          forward and backward + (cadence x (1 + max_lag) - 1) x step;
                  copy + checksum + ship must fit in it
  step            6 x parameters x tokens / (GPUs x tflops x efficiency), if it is not given

keys of FILE (those without a default have to be there):
{keys}

examples:
  deadpool plan configs/65b.yaml
  deadpool plan configs/65b.yaml --set protection.replicas=2 --set cluster.spares=4
  deadpool plan configs/65b.yaml --set protection.scheme=parity
  deadpool plan configs/65b.yaml --json

exit status: 0 it holds; 2 refused, or the file is wrong
"""
_NODE_ROWS = (
    ("unique state", "unique_bytes"),
    ("own slots", "own_slots_bytes"),
    ("copies for others", "copies_bytes"),
    ("slots and copies", "memory_bytes"),
    ("out per step", "out_bytes_per_step"),
    ("in per step", "in_bytes_per_step"),
)


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "plan",
        help="before a run: nodes, memory and traffic from a file",
        description=_DESCRIPTION,
        epilog=_EPILOGUE.format(keys="\n".join(_keys())),
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the plan, YAML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="another value than the file's, to see what if; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the answer; with ``--json`` a refusal is an object as well."""
    try:
        plan = read_plan(args.file, args.set)
        try:
            found = assess(plan)
        except PlanError as error:
            raise PlanError(f"{args.file}: {error}") from error
    except PlanError as error:
        if args.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps({"ok": True, "file": str(args.file), **found.to_dict()}, allow_nan=False))
    else:
        print("\n".join(_describe(str(args.file), found)))
    return 0


def _describe(name: str, found: Assessment) -> list[str]:
    memory = [(title, *map(size, found.busiest(field))) for title, field in _NODE_ROWS]
    return [
        *_headline(name, found),
        "",
        "Memory and traffic of a node",
        *table(("", "mean", "largest"), memory),
        "",
        "One step",
        *_time_table(found),
        "",
        f"verdict: {found.verdict()}",
    ]


def _headline(name: str, found: Assessment) -> list[str]:
    parallel, cluster, protection = found.plan.parallel, found.plan.cluster, found.plan.protection
    sizes = (("tp", parallel.tp), ("cp", parallel.cp), ("ep", parallel.ep), ("pp", parallel.pp))
    shown = "".join(f"{key} {value} x " for key, value in sizes if value > 1)
    domains = len(set(found.placement.scene.domains.values()))
    survived = count(protection.survived, "lost node")
    return [
        f"{name}: {total_parameters(found.plan.model) / 1e9:.1f} B parameters,"
        f" {len(found.placement.roles)} roles ({shown}dp {parallel.dp})",
        f"  {count(cluster.nodes, 'node')} of {count(cluster.gpus_per_node, 'GPU')},"
        f" {count(cluster.spares, 'spare')}, {count(domains, 'failure domain')}",
        f"  {protection.name} for {survived}, every {count(protection.cadence, 'step')}, lag"
        f" {protection.max_lag}, {found.slots} slots",
    ]


def _time_table(found: Assessment) -> list[str]:
    times, lost = found.timing, found.lost_steps
    rows = [
        ("copy to host memory (PCIe)", times.copy_seconds),
        ("checksum", times.checksum_seconds),
        ("ship (network)", times.ship_seconds),
        ("ship at its pace", times.paced_ship_seconds),
        ("commit", times.commit_seconds),
        ("window", times.window_seconds),
        ("step", times.step_seconds),
    ]
    shown = [(title, f"{value:.3f}", f"{value / times.step_seconds:.1%}") for title, value in rows]
    return [
        *table(("", "seconds", "of the step"), shown),
        f"  RPO: at most {count(lost, 'step')}, {lost * times.step_seconds:.1f} s, computed again"
        " after a loss",
    ]


def _keys() -> list[str]:
    lines = []
    for section, cls in SECTIONS.items():
        lines.append(f"  {section}: {(cls.__doc__ or '').splitlines()[0]}")
        for entry in dataclasses.fields(cls):
            default = entry.default
            given = default is not dataclasses.MISSING and default is not None
            shown = f" (default: {str(default).lower()})" if given else ""
            lines.append(f"    {entry.name:<26} {entry.metadata['help']}{shown}")
    return lines
