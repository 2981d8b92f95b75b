"""``deadpool plan FILE``: will it hold? Memory, traffic, risk, spares and goodput before a run;
with --compare one table of all schemes of protection."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, count, size, table
from deadpool_megatron.planning.assess import (
    Assessment,
    assess,
    busiest,
    facts,
    lost_steps,
    verdict,
)
from deadpool_megatron.planning.compare import Row, compare
from deadpool_megatron.planning.file import read_plan
from deadpool_megatron.planning.keys import SECTIONS, Plan, PlanError

_DESCRIPTION = """\
Works out, from a file of numbers about a model and a cluster, what protection of every
iteration needs and what it gives: memory, traffic, the chance to lose state, spares, goodput.
Copies are placed by the code that places them in a run. Nothing is started or measured.

A plan that cannot hold is refused with one line: the number to change, and to what.
"""
_EPILOGUE = """\
formulas (docs/planning.md explains each, and what is left out):
  unique state    12 bytes per parameter of a role's shard, and the extras
  memory          (2 or 3, + max_lag) slots per role, and as many for each copy held
  window          forward and backward + (cadence x (1 + max_lag) - 1) x step;
                  copy + checksum + ship must fit in it
  loss of state   choices of k nodes that contain all holders of some state / all choices
  spares          P(at most S of N + S away), each away for repair / (mtbf + repair)
  goodput         t / ((1/L + C) x (exp(L x t) - 1)): segments of t, failures at rate L, cost C
  step            6 x parameters x tokens / (GPUs x tflops x efficiency), if it is not given

keys of FILE (those without a default have to be there):
{keys}

examples:
  deadpool plan configs/65b.yaml
  deadpool plan configs/65b.yaml --set protection.replicas=2 --set cluster.spares=4
  deadpool plan configs/65b.yaml --set faults.node_mtbf_hours=5000
  deadpool plan configs/65b.yaml --compare
  deadpool plan configs/65b.yaml --json

exit status: 0 holds and reaches goal.goodput; 1 holds, but does not reach it; 2 refused
"""
_MISSES_GOAL = 1
_NODE_ROWS = (
    ("unique state", "unique_bytes"),
    ("own slots", "own_slots_bytes"),
    ("copies for others", "copies_bytes"),
    ("slots and copies", "memory_bytes"),
    ("out per step", "out_bytes_per_step"),
    ("in per step", "in_bytes_per_step"),
)
_HEADER = (
    "scheme",
    "memory",
    "sent per step",
    "of window",
    "1 node",
    "2 nodes",
    "3 nodes",
    "domains",
    "RPO",
    "goodput",
)


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "plan",
        help="before a run: memory, traffic, risk, spares and goodput from a file",
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
    parser.add_argument(
        "--compare", action="store_true", help="all schemes of protection, side by side"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the answer; with ``--json`` a refusal is an object as well."""
    try:
        plan = read_plan(args.file, args.set)
        if args.compare:
            return _compare(args, plan)
        try:
            found = assess(plan)
        except PlanError as error:
            raise PlanError(f"{args.file}: {error}") from error
    except PlanError as error:
        if args.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps({"ok": True, "file": str(args.file), **facts(found)}, allow_nan=False))
    else:
        print("\n".join(describe(str(args.file), found)))
    return 0 if found.reaches_goal else _MISSES_GOAL


def describe(name: str, found: Assessment) -> list[str]:
    """The answer as text."""
    return [
        _headline(name, found),
        "",
        "Memory and traffic of a node",
        *_node_table(found),
        "",
        "One step",
        *_time_table(found),
        "",
        "Losing nodes together",
        *_risk_table(found),
        "",
        "Spares and goodput",
        *_goodput_table(found),
        "",
        f"verdict: {verdict(found)}",
    ]


def describe_schemes(name: str, rows: list[Row]) -> list[str]:
    """The table, and a line for each scheme that cannot hold."""
    held = [row for row in rows if row.found is not None]
    lines = [f"{name}: the schemes side by side", ""]
    if held:
        lines += table(_HEADER, [_cells(row.facts()) for row in held])
        lines += [
            "  memory, sent: of the fullest and of the busiest node; 1 to 3 nodes: chance that"
            " losing them loses state;",
            "  domains: those whose loss loses state; RPO: steps computed again after a loss, at"
            " most",
        ]
    return lines + [f"  {row.scheme} cannot be: {row.refusal}" for row in rows if row.refusal]


def _compare(args: argparse.Namespace, plan: Plan) -> int:
    rows = compare(plan)
    if not any(row.found for row in rows):
        raise PlanError(f"{args.file}: no scheme can hold; {rows[0].scheme}: {rows[0].refusal}")
    if args.json:
        schemes = [row.facts() for row in rows]
        print(json.dumps({"ok": True, "file": str(args.file), "schemes": schemes}))
    else:
        print("\n".join(describe_schemes(str(args.file), rows)))
    return 0


def _headline(name: str, found: Assessment) -> str:
    parallel, cluster = found.plan.parallel, found.plan.cluster
    sizes = (("tp", parallel.tp), ("cp", parallel.cp), ("ep", parallel.ep), ("pp", parallel.pp))
    shown = " x ".join(f"{key} {value}" for key, value in sizes if value > 1)
    domains = len(set(found.placement.domains.values()))
    return (
        f"{name}: {found.parameters / 1e9:.1f} B parameters,"
        f" {len(found.placement.roles)} roles ({shown}{' x ' if shown else ''}dp {parallel.dp})\n"
        f"  {count(cluster.nodes, 'node')} of {count(cluster.gpus_per_node, 'GPU')},"
        f" {count(cluster.spares, 'spare')}, {count(domains, 'failure domain')};"
        f" {_protection(found)}, lag {found.plan.protection.max_lag},"
        f" {found.placement.slots} slots"
    )


def _protection(found: Assessment) -> str:
    protection = found.plan.protection
    cadence = "" if protection.cadence == 1 else f", every {protection.cadence} steps"
    if protection.scheme == "buddy":
        return count(protection.replicas, "replica") + cadence
    survived = f" for {protection.survived}" if protection.survived else ""
    return f"{protection.name}{survived}{cadence}"


def _node_table(found: Assessment) -> list[str]:
    rows = []
    for title, name in _NODE_ROWS:
        mean, largest = busiest(found, name)
        rows.append((title, size(mean), size(largest)))
    return [*table(("", "mean", "largest"), rows), f"  {_placed(found)}"]


def _placed(found: Assessment) -> str:
    placement, protection = found.placement, found.plan.protection
    if protection.scheme == "local":
        return "no copies: the own node holds the only ones"
    if protection.scheme == "local-twice":
        return "a second copy of each role on its own node, none elsewhere"
    copies = sum(len(role.buddies) for role in placement.roles)
    if not placement.groups:
        return f"{copies} copies of roles, no two in one failure domain, none in their owner's"
    blocks = sum(len(group.blocks) for group in placement.groups)
    most = max(len(group.roles) for group in placement.groups)
    return f"{blocks} parity blocks over groups of up to {most} roles, each on another node"


def _time_table(found: Assessment) -> list[str]:
    times, lost = found.timing, lost_steps(found.plan, found.placement.slots)
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
        f"  hidden behind the step: {times.hidden_fraction:.0%} of the commit;"
        f" {times.window_seconds - times.commit_seconds:.3f} s of the window are left",
        f"  RPO: at most {count(lost, 'step')}, {lost * times.step_seconds:.1f} s, computed again"
        " after a loss",
    ]


def _risk_table(found: Assessment) -> list[str]:
    risk = found.risk
    rows = [
        (count(lost, "node"), _chance(chance))
        for lost, chance in enumerate(risk.loss_probability, start=1)
    ]
    fatal = risk.fatal_domains
    domain = f"a whole failure domain: state is lost with {', '.join(fatal)}"
    if not fatal:
        domain = "a whole failure domain: no state is lost"
    return [
        *table(("lost at once", "P(state lost)"), rows),
        f"  {domain}",
        f"  exposed {risk.exposure_seconds:.1f} s after each loss",
        f"  between losses of a node {_time(risk.hours_between_node_losses)};"
        f" of state, if nodes fail independently, {_time(risk.hours_between_state_losses)}",
    ]


def _goodput_table(found: Assessment) -> list[str]:
    goodput, plan = found.goodput, found.plan
    rows = [
        ("hot swap", goodput.hot_swap_with_spare, goodput.hot_swap),
        ("restart from checkpoint", goodput.restart_with_spare, goodput.restart),
    ]
    shown = [(title, f"{with_spare:.4f}", f"{whole:.4f}") for title, with_spare, whole in rows]
    needed = goodput.spares_needed
    enough = f"{count(needed, 'spare')} needed for" if needed is not None else "no spares reach"
    return [
        *table(("goodput", "with a spare there", "with waits"), shown),
        f"  {count(plan.cluster.spares, 'spare')}: enough nodes {goodput.available:.3%} of the"
        f" time; {enough} goodput {plan.goal.goodput:g}",
    ]


def _chance(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def _time(hours: float) -> str:
    if hours == float("inf"):
        return "never"
    for limit, unit, hours_each in ((48.0, "h", 1.0), (2 * 8766.0, "days", 24.0)):
        if hours < limit:
            return f"{hours / hours_each:.1f} {unit}"
    return f"{float(f'{hours / 8766.0:.3g}'):,.0f} years"


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


def _cells(known: dict[str, Any]) -> tuple[str, ...]:
    chances = ["0" if p == 0 else f"{p:.3g}" for p in known["loss_probability"]]
    return (
        known["scheme"],
        size(known["memory_bytes"]),
        size(known["sent_bytes_per_step"]),
        f"{known['commit_of_window']:.0%}",
        *chances,
        f"{known['fatal_domains']} of {known['domains']}",
        f"{known['most_lost_steps']} ({known['most_lost_seconds']:.3g} s)",
        f"{known['goodput']:.4f}",
    )
