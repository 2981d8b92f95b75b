"""``deadpool gpu-health``: a health command that asks NVML and the kernel log for broken GPUs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

from deadpool_megatron.preflight import nvml, xids
from deadpool_megatron.preflight.gpus import visible_gpus
from deadpool_megatron.preflight.health import Answer, Health

_DESCRIPTION = """\
Asks NVML (pip install 'deadpool-megatron[nvml]') about the GPUs that this process sees, and the
kernel log of this host for Xids, by which NVIDIA's driver tells of faults. Made for
--deadpool-health-command. What needs a reset or a repair takes the node out: uncorrected ECC
errors, a row that is to be remapped or could not be, a GPU that is lost, an Xid of a device (48,
63, 64, 74, 79, 94, 95). What makes it slow leaves it as a last resort: heat, an NVLink that had to
recover. Xids of a program (13, 31, 43, 45) and all others cost nothing.
"""
_EXAMPLES = """\
examples:
  deadpool run --deadpool-health-command "deadpool gpu-health" ...

exit status: 0 good, or neither could be asked; 1 a last resort; 2 a device is broken
"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "gpu-health",
        help="health command: do NVML or the kernel log tell of a broken GPU?",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hours", type=float, default=24.0, help="leave older Xids out (default: 24)"
    )


def run(
    args: argparse.Namespace,
    load_library: Callable[[], nvml.Library] = nvml.load_library,
    read_log: Callable[[], Iterable[xids.LogLine]] = xids.read_kernel_log,
) -> int:
    """Answer as a health command does: the worse of the two, and both in one line."""
    answers = (_ask_nvml(load_library), _ask_log(read_log, args.hours))
    worst = max(answer.health for answer in answers)
    print("; ".join(answer.text for answer in answers if answer.health is worst))
    return worst


def _ask_nvml(load_library: Callable[[], nvml.Library]) -> Answer:
    try:
        return nvml.judge_gpus(nvml.read_gpus(load_library(), visible_gpus(os.environ)))
    except nvml.NvmlUnavailable as error:
        return Answer(Health.GOOD, f"not asked: {error}")


def _ask_log(read_log: Callable[[], Iterable[xids.LogLine]], hours: float) -> Answer:
    now = xids.boot_seconds()
    try:
        bad = xids.newest_bad(read_log(), now - hours * 3600)
    except OSError as error:
        return Answer(Health.GOOD, f"kernel log not asked: {error}")
    if bad is None:
        return Answer(Health.GOOD, "no Xid of a broken device")
    ago = now - bad.boot_seconds
    return Answer(Health.OUT, f"Xid {bad.number} of GPU {bad.device}, {ago:.0f} s ago")
