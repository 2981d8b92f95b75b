"""The kinds of failure, told apart: what an end of a process means, in words and with its cause.

Pure. The texts that mark a device or a communicator are those of CUDA, NCCL, torch and gloo.
"""

from __future__ import annotations

import re
import signal
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path

from deadpool_megatron.preflight import health

# What failed may be a consequence; its cause is reported within this time.
GRACE_SECONDS = 0.5


class ExitStatus(IntEnum):
    """The exit statuses of runs and of their processes, each with one meaning."""

    FAILED = 1  # the program failed, no more can be restored, or too little is fit
    BAD_INPUT = 2  # arguments or an environment that no other try would make good
    DIVERGENCE = 3  # the same computation gave other numbers
    NONFINITE = 4  # a loss, or what else is judged, is NaN or infinite
    EXCLUDED = 68  # an agent whose host is not fit for the run
    FENCED = 69  # an agent that was cut off, or put aside
    AGENT_LOST = 70  # a member without its agent
    SUPERSEDED = 71  # a coordinator whose successor has taken over
    NO_DEVICE = 72  # a member without a device where its run has one for each
    UNCLEAN = 73  # a member that cannot show that nothing writes into its memory any more
    SAVED = 75  # what there was is saved: the run can continue later
    EXTRAS_OUTGROWN = 76  # what changes beside the optimizer's state is too large for its room
    OTHER_PROGRAM = 77  # a member that has loaded another program than its run
    STOPPED = 130  # interrupted, or stopped by its user
    TERMINATED = 143  # an agent that left when it was told to


class FailureKind(StrEnum):
    """The reason why an epoch ended, or a node or process was lost."""

    PROCESS_CRASH = "process-crash"  # ended by itself, or killed by somebody outside of the run
    DEVICE_ERROR = "device-error"  # the accelerator, its memory or its driver
    NO_SHARED_MEMORY = "no-room"  # the host has no shared memory for the slots of a process
    COMMUNICATOR_ERROR = "communicator-error"  # an operation between roles failed
    NODE_LOST = "node-lost"  # the connection of its agent ended
    NODE_CUT = "node-cut"  # connected, but nothing is heard, nor is anything received there
    NODE_FROZEN = "node-frozen"  # its kernel receives what is sent, its agent does not run
    EXCLUDED = "left-out"  # its host is not fit for the run
    MEMBER_FROZEN = "member-frozen"  # one process shows no sign of life
    HANG = "hang"  # everything lives, nothing moves
    NONFINITE_LOSS = "nonfinite-loss"  # the loss, or what else is judged, is NaN or infinite
    SLOW_NODE = "slow-node"  # much slower than its peers
    SILENT_CORRUPTION = "silent-corruption"  # it computed, or held, other numbers than its peers
    OTHER_PROGRAM = "other-program"  # of a process, or of the state that is to be continued from
    CORRUPT_STATE = "corrupt-state"  # a state did not restore, or not the same on all peers
    BUG = "bug"  # the same failure again at the same step: the program's own
    # Planned: a node was asked to leave, copies are moved, protection changes, the run is to end.
    DRAINED = "drained"
    COORDINATOR = "coordinator"  # the coordinator was replaced
    RESTART = "restart"  # all processes had ended, and were started again


@dataclass(frozen=True)
class Meaning:
    """The meaning of a kind of failure; failures.toml says more. ``to_do``: empty for nothing."""

    rank: int
    called: str
    noticed: str
    to_do: str = ""


_TABLE = Path(__file__).with_name("failures.toml")
MEANINGS: Mapping[str, Meaning] = {
    kind: Meaning(**row) for kind, row in tomllib.loads(_TABLE.read_text()).items()
}


def rank(kind: str) -> int:
    """The place of a kind among the causes of one epoch's end: the least is the likeliest. A kind
    of a newer version is the last."""
    return MEANINGS[kind].rank if kind in MEANINGS else len(MEANINGS)


def process_name(node: int, slot: int, incarnation: int) -> str:
    """``process 1 of node 2``, ``process 1 of node 2 (start 3)``."""
    return f"process {slot} of node {node}" + (f" (start {incarnation + 1})" if incarnation else "")


def signal_name(number: int) -> str:
    """``SIGKILL`` rather than 9; the number of one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Ends of a process that its host is most likely to blame for: on another one it may go on.
OF_THE_HOST = frozenset({FailureKind.DEVICE_ERROR, FailureKind.NO_SHARED_MEMORY})


def describe_kind(kind: str) -> str:
    """A kind for people; one that is not known (of a newer version) as it is."""
    return MEANINGS[kind].called if kind in MEANINGS else kind


@dataclass(frozen=True)
class _Mark:
    pattern: re.Pattern[str]
    kind: FailureKind


def _mark(text: str, kind: FailureKind) -> _Mark:
    return _Mark(re.compile(text, re.IGNORECASE), kind)


# The first that matches counts, so what is more special stands first.
_MARKS: tuple[_Mark, ...] = (
    _mark(r"\bno room for (own|\.parked)-\S+: \d+ bytes needed", FailureKind.NO_SHARED_MEMORY),
    # A program that wants too much memory wants it on any device.
    _mark(r"out of memory|OutOfMemoryError", FailureKind.PROCESS_CRASH),
    # A program's own fault (Xid 13 or 31): its node can do nothing about it.
    _mark(
        r"illegal memory access|device-side assert|misaligned address", FailureKind.PROCESS_CRASH
    ),
    _mark(r"cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS", FailureKind.PROCESS_CRASH),
    _mark(r"cudaError(Assert|MisalignedAddress)\b", FailureKind.PROCESS_CRASH),
    _mark(r"CUDA_ERROR_(ASSERT|MISALIGNED_ADDRESS)\b", FailureKind.PROCESS_CRASH),
    # NCCL reports a broken device or driver with the words of CUDA.
    _mark(r"NCCL.*unhandled (cuda|system) error", FailureKind.DEVICE_ERROR),
    _mark(r"unhandled (cuda|system) error.*NCCL", FailureKind.DEVICE_ERROR),
    _mark(r"ncclUnhandledCudaError|ncclSystemError", FailureKind.DEVICE_ERROR),
    _mark(r"CUDA (driver |unknown )?error|\bcudaError|CUDA_ERROR_", FailureKind.DEVICE_ERROR),
    # torch as it starts up: the fabric manager is down, for one (error 802).
    _mark(r"cudaGetDeviceCount|Error 802: system not yet init", FailureKind.DEVICE_ERROR),
    _mark(r"AcceleratorError", FailureKind.DEVICE_ERROR),
    _mark(r"\bcu(BLAS|DNN|SOLVER|FFT)\b.*(error|_STATUS_)", FailureKind.DEVICE_ERROR),
    _mark(r"(CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_", FailureKind.DEVICE_ERROR),
    _mark(r"\bECC\b", FailureKind.DEVICE_ERROR),
    _mark(r"\bXid\b", FailureKind.DEVICE_ERROR),
    _mark(r"GPU (has fallen off|is lost)|fallen off the bus", FailureKind.DEVICE_ERROR),
    _mark(r"NVML|nvidia-smi|No CUDA GPUs are available", FailureKind.DEVICE_ERROR),
    _mark(r"\bHIP error|hipError", FailureKind.DEVICE_ERROR),
    _mark(r"DistBackendError|DistNetworkError|DistStoreError", FailureKind.COMMUNICATOR_ERROR),
    _mark(r"\bNCCL (error|WARN)|\bnccl\w+Error\b", FailureKind.COMMUNICATOR_ERROR),
    _mark(r"/gloo/|\bgloo\b.*(closed|timed out|reset)", FailureKind.COMMUNICATOR_ERROR),
    _mark(r"ProcessGroup\w*.*(timeout|timed out|watchdog)", FailureKind.COMMUNICATOR_ERROR),
    _mark(r"CommunicatorFault", FailureKind.COMMUNICATOR_ERROR),
)


def kind_of_end(last_line: str) -> FailureKind:
    """The kind of a process's end by its last words; without any it is a crash."""
    if (broken := health.quotes_broken_device(last_line)) is not None:
        return FailureKind.DEVICE_ERROR if broken else FailureKind.PROCESS_CRASH
    for mark in _MARKS:
        if mark.pattern.search(last_line):
            return mark.kind
    return FailureKind.PROCESS_CRASH


def is_broken_for_good(exit_code: int | None, last_line: str) -> bool:
    """Return whether the end of a process says that its node is of no use before it is repaired,
    where one device error by itself may have been a stray particle."""
    no_use = (ExitStatus.NO_DEVICE, ExitStatus.OTHER_PROGRAM)
    return exit_code in no_use or health.quotes_broken_device(last_line) is True


_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def same_text(line: str) -> str:
    """A line without its numbers: equal for the same cause in another process or at another time.

    Addresses, ranks, process numbers and sizes differ between two failures with one cause.
    """
    return _NUMBERS.sub("#", line)
