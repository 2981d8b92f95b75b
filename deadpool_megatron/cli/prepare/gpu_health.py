"""Searches the kernel log of this host for Xids, the error reports of NVIDIA's driver. For use with
--deadpool-health-command. An Xid of a broken device (48, 63, 64, 74, 79, 94, 95) excludes the node.
Xids of a program (13, 31, 43, 45) and all others are ignored. For the counters of a device use
DCGM, NHC or gpucm (docs/monitoring.md#health-of-nodes).

examples:
  deadpool run --deadpool-health-command "deadpool gpu-health" ...

exit status: 0 good, or the log is closed to this user; 2 a device is broken
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from deadpool_megatron.cli.common import number
from deadpool_megatron.preflight import health
from deadpool_megatron.preflight.health import Health


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = "ignore older Xids (default: 24)"
    parser.add_argument("--hours", type=number(float, 0), default=24.0, help=text)


def run(
    args: argparse.Namespace, read_log: Callable[[], Iterable[bytes]] = health.read_kernel_log
) -> int:
    """Print a line and return a status, as a health command does."""
    now = health.boot_seconds()
    try:
        bad = health.newest_broken(read_log(), now - args.hours * 3600)
    except OSError as error:
        print(f"kernel log not asked: {error}")
        return Health.GOOD
    if bad is None:
        print("no Xid of a broken device")
        return Health.GOOD
    print(f"Xid {bad.number} of GPU {bad.device}, {now - bad.boot_seconds:.0f} s ago")
    return Health.OUT
