"""``deadpool check``: is this host fit for a run?"""

from __future__ import annotations

import argparse
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, check_platform, warn_of_danger_above
from deadpool_megatron.cli.prepare import check_table
from deadpool_megatron.cli.slurm_environment import (
    INTERFACE_VARIABLE,
    host_address,
    interface_address,
)
from deadpool_megatron.cluster.run_directory.bad_nodes import noted_against
from deadpool_megatron.planning.assess import assess, busiest
from deadpool_megatron.planning.file import read_plan
from deadpool_megatron.planning.keys import PlanError
from deadpool_megatron.preflight import host
from deadpool_megatron.preflight.facts import Needs
from deadpool_megatron.preflight.judge import problems
from deadpool_megatron.settings import LONGEST_SECONDS

_DESCRIPTION = """\
Facts and problems of this host alone. All nodes of a run, with the links between them, are looked
at by 'deadpool agent --check-only' on each of them.
"""
_EPILOG = """\
examples:
  deadpool check
  deadpool check --runs runs
  deadpool check --plan configs/65b.yaml
  srun --ntasks-per-node=1 deadpool agent --from-slurm --check-only --run-dir DIR \\
      --nodes 64 --spares 2 --nproc-per-node 8

exit status: 0 nothing is wrong, 1 this host has a problem, 2 bad input
"""
_NOT_GOOD = 1
_GB = 1e9
_MOST_GB = 1e12


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "check",
        help="before a run: is this host fit to train?",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    address = parser.add_mutually_exclusive_group()
    address.add_argument("--host", metavar="ADDRESS", help="address that other nodes reach")
    address.add_argument(
        "--interface",
        metavar="NAME",
        help=f"or the network interface that has it (default: the variable {INTERFACE_VARIABLE})",
    )
    need = parser.add_mutually_exclusive_group()
    need.add_argument(
        "--plan", type=Path, metavar="FILE", help="memory as 'deadpool plan FILE' says"
    )
    need.add_argument(
        "--shm-gb", type=float, default=0.0, metavar="X", help="GB of shared memory a node needs"
    )
    parser.add_argument(
        "--health-command", default="", metavar="CMD", help="as --deadpool-health-command"
    )
    parser.add_argument(
        "--health-seconds", type=float, default=60.0, metavar="S", help="limit for it"
    )
    parser.add_argument(
        "--runs", type=Path, metavar="RUNS", help="was this host put aside by a run in RUNS?"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    if not 0 < args.health_seconds <= LONGEST_SECONDS:
        raise CommandError(
            f"--health-seconds must be above 0 and at most {LONGEST_SECONDS:.0f},"
            f" got {args.health_seconds:g}"
        )
    needs = Needs(nodes=1, shm_bytes=_shm_bytes(args))
    facts = host.read_facts(_address(args), args.health_command, args.health_seconds)
    if args.runs is not None:
        warn_of_danger_above(args.runs / "any run")
        facts = replace(facts, noted=noted_against(facts.hostname, args.runs, ""))
    check_platform()
    found = [finding.text for finding in problems(facts, needs)]
    if args.json:
        answer = {"ok": not found, "facts": facts.to_dict(), "problems": found}
        print(json.dumps(answer, allow_nan=False))
    else:
        print("\n".join(check_table.describe_host(facts, found)))
    return _NOT_GOOD if found else 0


def _shm_bytes(args: argparse.Namespace) -> int:
    """Shared memory that a node needs, 0 if that is not known."""
    if args.plan is None:
        if not 0 <= args.shm_gb <= _MOST_GB:
            raise CommandError(
                f"--shm-gb must not be negative, nor above {_MOST_GB:g}, got {args.shm_gb:g}"
            )
        return int(args.shm_gb * _GB)
    try:
        found = assess(read_plan(args.plan))
    except PlanError as error:
        raise CommandError(f"--plan {error}") from error
    return busiest(found, "memory_bytes")[1]


def _address(args: argparse.Namespace) -> str:
    """Empty where no other host could reach this one, which is of no interest to it alone."""
    if args.host is not None:
        return str(args.host)
    interface = args.interface or os.environ.get(INTERFACE_VARIABLE, "")
    try:
        return interface_address(interface) if interface else host_address(socket.gethostname())
    except CommandError:
        if args.interface:
            raise
        return ""
