"""``deadpool bad-nodes`` and ``gpu-health``: hosts that earlier runs have put aside, and a health
command that asks the kernel log for broken GPUs."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
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
from deadpool_megatron.preflight import health
from deadpool_megatron.preflight.health import Health

_BAD_NODES = """\
Shows the hosts that runs in the directory RUNS have quarantined, oldest first, with the kind of
failure and the evidence. RUNS/bad-nodes.json lists them. The next runs there exclude these hosts.
After a repair, remove the entry of a host (--forget), or wait until it expires.
"""
_BAD_NODES_EXAMPLES = """\
examples:
  deadpool bad-nodes runs
  deadpool bad-nodes --forget node17 runs
  sbatch --exclude="$(deadpool bad-nodes --names runs)" scripts/slurm/small_test.sbatch

exit status: 0 shown or forgotten, none included; 2 the file is damaged, or others could have
written it
"""
_GPU_HEALTH = """\
Searches the kernel log of this host for Xids, the error reports of NVIDIA's driver. For use with
--deadpool-health-command. An Xid of a broken device (48, 63, 64, 74, 79, 94, 95) excludes the node.
Xids of a program (13, 31, 43, 45) and all others are ignored. For the counters of a device use
DCGM, NHC or gpucm (docs/health.md).
"""
_GPU_HEALTH_EXAMPLES = """\
examples:
  deadpool run --deadpool-health-command "deadpool gpu-health" ...

exit status: 0 good, or the log is closed to this user; 2 a device is broken
"""


def add_parser(subparsers: Any) -> None:
    """Add the two sub-commands."""
    bad_nodes = subparsers.add_parser(
        "bad-nodes",
        help="show the hosts that earlier runs have quarantined",
        description=_BAD_NODES,
        epilog=_BAD_NODES_EXAMPLES,
    )
    bad_nodes.add_argument("runs", type=Path, metavar="RUNS", help="directory that holds the runs")
    bad_nodes.add_argument(
        "--hours",
        type=float,
        default=RECENT_HOURS,
        help=f"ignore older entries (default: {RECENT_HOURS:g}, as runs do)",
    )
    what = bad_nodes.add_mutually_exclusive_group()
    what.add_argument("--names", action="store_true", help="only their names, with commas")
    what.add_argument("--forget", metavar="HOST", help="remove the entries of a repaired host")

    gpu_health = subparsers.add_parser(
        "gpu-health",
        help="health command: search the kernel log for a broken GPU",
        description=_GPU_HEALTH,
        epilog=_GPU_HEALTH_EXAMPLES,
    )
    gpu_health.add_argument(
        "--hours", type=float, default=24.0, help="ignore older Xids (default: 24)"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    return _bad_nodes(args) if args.subcommand == "bad-nodes" else gpu_health(args)


def gpu_health(
    args: argparse.Namespace,
    read_log: Callable[[], Iterable[bytes]] = health.read_kernel_log,
) -> int:
    """Answer as a health command does, in one line."""
    now = health.boot_seconds()
    try:
        bad = health.newest_bad(read_log(), now - args.hours * 3600)
    except OSError as error:
        print(f"kernel log not asked: {error}")
        return Health.GOOD
    if bad is None:
        print("no Xid of a broken device")
        return Health.GOOD
    print(f"Xid {bad.number} of GPU {bad.device}, {now - bad.boot_seconds:.0f} s ago")
    return Health.OUT


def _bad_nodes(args: argparse.Namespace) -> int:
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
