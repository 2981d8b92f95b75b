"""Shows the hosts that runs in the directory RUNS have quarantined, oldest first, with the kind of
failure and the evidence. RUNS/bad-nodes.json lists them. The next runs there exclude these hosts.
After a repair, remove the entry of a host (--forget), or wait until it expires.

examples:
  deadpool bad-nodes runs
  deadpool bad-nodes --forget node17 runs
  sbatch --exclude="$(deadpool bad-nodes --names runs)" scripts/slurm/small_test.sbatch

exit status: 0 shown or forgotten, none included; 2 the file is damaged, or others could have
written it
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from deadpool_megatron.cli.common import CommandError, number
from deadpool_megatron.cluster.run_directory.bad_nodes import (
    MOST_LEFT_OUT,
    RECENT_HOURS,
    forget_host,
    read_bad_nodes,
    recent_hosts,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("runs", type=Path, metavar="RUNS", help="directory that holds the runs")
    parser.add_argument(
        "--hours",
        type=number(float, 0),
        default=RECENT_HOURS,
        help=f"ignore older entries (default: {RECENT_HOURS:g}, as runs do)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--names", action="store_true", help="only their names, with commas")
    what.add_argument("--forget", metavar="HOST", help="remove the entries of a repaired host")


def run(args: argparse.Namespace) -> int:
    """Print them, or forget one."""
    os.scandir(args.runs).close()  # a slip in the name is not an empty answer
    try:
        if args.forget is not None:
            print(f"{forget_host(args.runs, args.forget)} entries of {args.forget} removed")
            return 0
        known = read_bad_nodes(args.runs)
    except ValueError as error:
        raise CommandError(str(error)) from error
    since = time.time() - args.hours * 3600
    hosts = recent_hosts(known, since, MOST_LEFT_OUT)
    if args.names:
        print(",".join(hosts))
        return 0
    shown = [one for one in known if one.host in hosts and one.wall_seconds >= since]
    for one in shown:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.wall_seconds))
        print(f"{when}  {one.host}  {one.kind}  run {one.run}: {one.evidence}")
    if not shown:
        print(f"no node was quarantined in the last {args.hours:g} h")
    return 0
