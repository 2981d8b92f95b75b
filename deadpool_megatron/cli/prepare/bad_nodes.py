"""Shows the hosts that runs in the directory RUNS have quarantined, oldest first, with the kind of
failure and the evidence. RUNS/bad-nodes.json lists them. The next runs there exclude these hosts.
After a repair, remove the entry of a host (--forget), or wait until it expires.

examples:
  deadpool bad-nodes runs
  deadpool bad-nodes --forget node17 runs
  sbatch --exclude="$(deadpool bad-nodes --names runs)" scripts/slurm/small_test.sbatch

exit status: 0 shown or removed, even if there are no entries; 2 the file is damaged, or other
users could have written it
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from deadpool_megatron.cli.common import CommandError, number
from deadpool_megatron.cluster.run_directory import bad_nodes
from deadpool_megatron.cluster.run_directory.bad_nodes import MAX_EXCLUDED, RECENT_HOURS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", type=Path, metavar="RUNS", help="directory that holds the runs")
    text = f"ignore older entries (default: {RECENT_HOURS:g}, as runs do)"
    parser.add_argument("--hours", type=number(float, 0), default=RECENT_HOURS, help=text)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--names", action="store_true", help="only their names, with commas")
    action.add_argument("--forget", metavar="HOST", help="remove the entries of a repaired host")


def run(args: argparse.Namespace) -> int:
    """Print the entries, or remove those of a host."""
    os.scandir(args.runs).close()  # a misspelt directory is an error, not an empty answer
    try:
        if args.forget is not None:
            count = bad_nodes.forget_host(args.runs, args.forget)
            print(f"{count} entries of {args.forget} removed")
            return 0
        entries = bad_nodes.read_bad_nodes(args.runs)
    except ValueError as error:
        raise CommandError(str(error)) from error
    since = time.time() - args.hours * 3600
    hosts = bad_nodes.recent_hosts(entries, since, MAX_EXCLUDED)
    if args.names:
        print(",".join(hosts))
        return 0
    recent = [entry for entry in entries if entry.host in hosts and entry.wall_seconds >= since]
    for entry in recent:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.wall_seconds))
        print(f"{when}  {entry.host}  {entry.kind}  run {entry.run}: {entry.evidence}")
    if not recent:
        print(f"no node was quarantined in the last {args.hours:g} h")
    return 0
