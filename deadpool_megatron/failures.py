"""The kinds of failure, with their texts for people, and the kind that the end of a process shows.

Pure. The patterns for a device or a communicator match messages of CUDA, NCCL, torch and gloo.
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

# A reported failure may be the consequence of another failure, which is reported within this time.
GRACE_SECONDS = 0.5


class ExitStatus(IntEnum):
    """The exit statuses of runs and of their processes, each with a single meaning."""

    FAILED = 1  # the program failed, nothing can be restored, or too few nodes are fit
    BAD_INPUT = 2  # wrong arguments or a wrong environment: another try would fail as well
    DIVERGENCE = 3  # the same computation gave other numbers
    NONFINITE = 4  # a loss, or another checked number, is NaN or infinite
    EXCLUDED = 68  # an agent whose host is not fit for the run
    FENCED = 69  # an agent that was cut off, or quarantined
    AGENT_LOST = 70  # a member without its agent
    SUPERSEDED = 71  # a coordinator whose successor has taken over
    NO_DEVICE = 72  # a member without a device, in a run in which each member needs one
    UNCLEAN = 73  # a member in which an interrupted operation may still write into memory
    SAVED = 75  # the state is saved, so the run can continue later
    EXTRAS_OUTGROWN = 76  # the extras are larger than their part of a slot
    OTHER_PROGRAM = 77  # a member that has loaded another program than its run
    STOPPED = 130  # interrupted, or stopped by its user
    TERMINATED = 143  # an agent that left on a signal


class FailureKind(StrEnum):
    """The reason why an epoch ended, or a node or process was lost."""

    PROCESS_CRASH = "process-crash"  # ended, or killed from outside of the run
    DEVICE_ERROR = "device-error"  # the accelerator, its memory or its driver
    NO_SHARED_MEMORY = "no-room"  # the host has no shared memory for the slots of a process
    COMMUNICATOR_ERROR = "communicator-error"  # an operation between roles failed
    NODE_LOST = "node-lost"  # the connection of its agent ended
    NODE_CUT = "node-cut"  # its agent is connected, but nothing arrives in either direction
    NODE_FROZEN = "node-frozen"  # its kernel receives, but its agent does not run
    EXCLUDED = "excluded"  # its host is not fit for the run
    MEMBER_FROZEN = "member-frozen"  # a process shows no sign of life
    HANG = "hang"  # all processes live, but no role makes progress
    NONFINITE_LOSS = "nonfinite-loss"  # the loss, or another checked number, is NaN or infinite
    SLOW_NODE = "slow-node"  # much slower than its peers
    SILENT_CORRUPTION = "silent-corruption"  # a role had other numbers than its peers
    OTHER_PROGRAM = "other-program"  # a process or a state is of another program
    CORRUPT_STATE = "corrupt-state"  # a state could not be restored, or differed between peers
    BUG = "bug"  # a failure that was repeated at the same iteration, so a fault of the program
    # A planned change: a node leaves, copies move, the protection changes, or the run ends.
    PLANNED = "planned"
    COORDINATOR = "coordinator"  # the coordinator was replaced
    RESTART = "restart"  # all processes had ended, and were started again


@dataclass(frozen=True)
class Meaning:
    """The meaning of a kind of failure; see failures.toml. ``precedence``: see the function of the
    same name; ``called``: the kind for people; ``noticed``: the evidence; ``to_do``: the advice,
    empty for none."""

    precedence: int
    called: str
    noticed: str
    to_do: str = ""


_TABLE = Path(__file__).with_name("failures.toml")
MEANINGS: Mapping[str, Meaning] = {
    kind: Meaning(**row) for kind, row in tomllib.loads(_TABLE.read_text()).items()
}


def precedence(kind: str) -> int:
    """Return the precedence of a kind: of several failures that end an epoch, that with the lowest
    number is the likeliest cause. A kind of a newer version comes last."""
    return MEANINGS[kind].precedence if kind in MEANINGS else len(MEANINGS)


def process_name(node: int, local_rank: int, incarnation: int) -> str:
    """Return ``process 1 of node 2`` or ``process 1 of node 2 (start 3)``."""
    start = f" (start {incarnation + 1})" if incarnation else ""
    return f"process {local_rank} of node {node}{start}"


def signal_name(number: int) -> str:
    """Return the name of a signal, or a text with its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Kinds of a process's end that are the fault of its host, so that another host may help.
OF_THE_HOST = frozenset({FailureKind.DEVICE_ERROR, FailureKind.NO_SHARED_MEMORY})


def describe_kind(kind: str) -> str:
    """Return a kind for people; an unknown kind (of a newer version) unchanged."""
    return MEANINGS[kind].called if kind in MEANINGS else kind


# Patterns of the last line of a process's output. The first match counts, so special patterns come
# first.
_PATTERNS: tuple[tuple[str, FailureKind], ...] = (
    (r"\bno room for (own|\.parked)-\S+: \d+ bytes needed", FailureKind.NO_SHARED_MEMORY),
    # A program that needs too much memory needs it on any device.
    (r"out of memory|OutOfMemoryError", FailureKind.PROCESS_CRASH),
    # The program is at fault (Xid 13 or 31), not its node.
    (r"illegal memory access|device-side assert|misaligned address", FailureKind.PROCESS_CRASH),
    (r"cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS", FailureKind.PROCESS_CRASH),
    (r"cudaError(Assert|MisalignedAddress)\b", FailureKind.PROCESS_CRASH),
    (r"CUDA_ERROR_(ASSERT|MISALIGNED_ADDRESS)\b", FailureKind.PROCESS_CRASH),
    # NCCL reports a broken device or driver with the texts of CUDA.
    (r"NCCL.*unhandled (cuda|system) error", FailureKind.DEVICE_ERROR),
    (r"unhandled (cuda|system) error.*NCCL", FailureKind.DEVICE_ERROR),
    (r"ncclUnhandledCudaError|ncclSystemError", FailureKind.DEVICE_ERROR),
    (r"CUDA (driver |unknown )?error|\bcudaError|CUDA_ERROR_", FailureKind.DEVICE_ERROR),
    # torch could not initialise CUDA, for example because the fabric manager is down (error 802).
    (r"cudaGetDeviceCount|Error 802: system not yet init", FailureKind.DEVICE_ERROR),
    (r"AcceleratorError", FailureKind.DEVICE_ERROR),
    (r"\bcu(BLAS|DNN|SOLVER|FFT)\b.*(error|_STATUS_)", FailureKind.DEVICE_ERROR),
    (r"(CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_", FailureKind.DEVICE_ERROR),
    (r"\bECC\b", FailureKind.DEVICE_ERROR),
    (r"\bXid\b", FailureKind.DEVICE_ERROR),
    (r"GPU (has fallen off|is lost)|fallen off the bus", FailureKind.DEVICE_ERROR),
    (r"NVML|nvidia-smi|No CUDA GPUs are available", FailureKind.DEVICE_ERROR),
    (r"\bHIP error|hipError", FailureKind.DEVICE_ERROR),
    (r"DistBackendError|DistNetworkError|DistStoreError", FailureKind.COMMUNICATOR_ERROR),
    (r"\bNCCL (error|WARN)|\bnccl\w+Error\b", FailureKind.COMMUNICATOR_ERROR),
    (r"/gloo/|\bgloo\b.*(closed|timed out|reset)", FailureKind.COMMUNICATOR_ERROR),
    (r"ProcessGroup\w*.*(timeout|timed out|watchdog)", FailureKind.COMMUNICATOR_ERROR),
    (r"CommunicatorFault", FailureKind.COMMUNICATOR_ERROR),
)


def kind_of_end(last_line: str) -> FailureKind:
    """Return the kind of a process's end by the last line of its output; a crash if the line
    matches no pattern."""
    if (is_broken := health.quotes_broken_device(last_line)) is not None:
        return FailureKind.DEVICE_ERROR if is_broken else FailureKind.PROCESS_CRASH
    kinds = (kind for text, kind in _PATTERNS if re.search(text, last_line, re.IGNORECASE))
    return next(kinds, FailureKind.PROCESS_CRASH)


def is_broken_for_good(exit_code: int | None, last_line: str) -> bool:
    """Return whether the end of a process proves that its node must be repaired. A single device
    error may have been a stray particle."""
    statuses = (ExitStatus.NO_DEVICE, ExitStatus.OTHER_PROGRAM)
    return exit_code in statuses or health.quotes_broken_device(last_line) is True


_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def without_numbers(line: str) -> str:
    """Return a line with ``#`` instead of each number, so that failures with the same cause have
    equal lines: addresses, ranks, process numbers and sizes differ between such failures.
    """
    return _NUMBERS.sub("#", line)
