"""``deadpool bad-nodes``: hosts that earlier runs have put aside, to be left out of the next."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.run_directory.bad_nodes import (
    MOST_LEFT_OUT,
    RECENT_HOURS,
    forget_host,
    read_bad_nodes,
    recent_hosts,
)

_DESCRIPTION = """\
Shows the hosts that runs in the directory RUNS have put aside, oldest first, with the kind of
failure and the evidence. They stand in RUNS/bad-nodes.json. The next runs there leave these hosts
out: a host that was repaired has to be forgotten, or to wait until its entry is too old.
"""
_EXAMPLES = """\
examples:
  deadpool bad-nodes runs
  deadpool bad-nodes --forget node17 runs
  sbatch --exclude="$(deadpool bad-nodes --names runs)" scripts/slurm/small_test.sbatch

exit status: 0 shown or forgotten, none included; 2 the file is damaged, or others could have
written it
"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "bad-nodes",
        help="show the hosts that earlier runs have put aside",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="directory that holds the runs")
    parser.add_argument(
        "--hours",
        type=float,
        default=RECENT_HOURS,
        help=f"leave older ones out (default: {RECENT_HOURS:g}, as runs do)",
    )
    parser.add_argument(
        "--at-most",
        type=int,
        default=MOST_LEFT_OUT,
        help=f"so many hosts, the newest (default: {MOST_LEFT_OUT}, as runs do)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--names", action="store_true", help="only their names, with commas")
    what.add_argument("--forget", metavar="HOST", help="it was repaired: remove its entries")


def run(args: argparse.Namespace) -> int:
    """Print them, or forget one."""
    try:
        if args.forget is not None:
            print(f"{forget_host(args.runs, args.forget)} entries of {args.forget} removed")
            return 0
        known = read_bad_nodes(args.runs)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    since = time.time() - args.hours * 3600
    hosts = recent_hosts(known, since, args.at_most)
    if args.names:
        print(",".join(hosts))
        return 0
    shown = [one for one in known if one.host in hosts and one.wall_seconds >= since]
    for one in shown:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.wall_seconds))
        print(f"{when}  {one.host}  {one.kind}  run {one.run}: {one.evidence}")
    if not shown:
        print(f"no node was put aside in the last {args.hours:g} h")
    return 0
