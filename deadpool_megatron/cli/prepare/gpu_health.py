"""``deadpool gpu-health``: a health command that asks the kernel log for broken GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from deadpool_megatron.preflight import health
from deadpool_megatron.preflight.health import Health

_DESCRIPTION = """\
Looks in the kernel log of this host for Xids, by which NVIDIA's driver tells of faults. Made for
--deadpool-health-command. An Xid of a broken device (48, 63, 64, 74, 79, 94, 95) takes the node
out; those of a program (13, 31, 43, 45) and all others cost nothing. For what a device counts ask
DCGM, NHC or gpucm (docs/health.md).
"""
_EXAMPLES = """\
examples:
  deadpool run --deadpool-health-command "deadpool gpu-health" ...

exit status: 0 good, or the log is closed to this user; 2 a device is broken
"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "gpu-health",
        help="health command: does the kernel log tell of a broken GPU?",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--hours", type=float, default=24.0, help="leave older Xids out (default: 24)"
    )


def run(
    args: argparse.Namespace,
    read_log: Callable[[], Iterable[health.LogLine]] = health.read_kernel_log,
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
