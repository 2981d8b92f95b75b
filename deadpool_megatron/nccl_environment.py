"""Variables that NCCL, torch and Megatron read from a member's environment: name, value, why.

A recovery aborts the communicators of a process that continues, and makes new ones in it. What
torch does by default on an error of NCCL is the opposite: it ends the process. Each value here is
the one under which a survivor survives. An agent gives them to whatever it starts, before torch is
imported there; a value that the user has set is looked at when a member joins.

Read with torch 2.13 open (``ProcessGroupNCCL.hpp`` names the variables, and the names that they had
before, which still count) and core_v0.16.1 of Megatron-LM. Sources that are cited:

* NVRx: NVIDIA's resiliency extension, whose in-process restart aborts and remakes communicators
  too; its usage guide ("known issues") and its table of requirements.
* pytorch#149153: an abort hangs with NCCL 2.25.1, and does not with 2.26.2. pytorch#150690: before
  2.22 the communicators of a process cannot be aborted as one group. NVRx asks for 2.26.2.
* nccl#2140, nccl#1221: what NVLink SHARP brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum

# What torch takes for false.
_OFF = ("0", "n", "no", "f", "false")


class Otherwise(Enum):
    """The fate of another value that the user has set."""

    REFUSED = "refused"
    WARNED = "taken, with a warning"
    KEPT = "taken"


@dataclass(frozen=True)
class Variable:
    """One row. ``reason``: why members have ``value``, or what another one does; ``as_good``:
    values that do the same; ``former_name``: under which torch reads it, too; ``contrary``: where
    there are any, all values but these do the same.
    """

    name: str
    value: str
    reason: str
    as_good: tuple[str, ...] = ()
    former_name: str = ""
    otherwise: Otherwise = Otherwise.REFUSED
    contrary: tuple[str, ...] = ()

    def is_contrary(self, given: str) -> bool:
        """Return whether a recovery, or the search for who hangs, cannot have the value
        ``given``."""
        if self.contrary:
            return given.lower() in self.contrary
        return given.lower() not in {self.value.lower(), *self.as_good}

    def other_value(self, environment: Mapping[str, str]) -> str:
        """Returns what the user has set instead, as ``NAME=value``; empty if nothing."""
        for name in (self.name, self.former_name):
            given = environment.get(name)
            if given is not None and self.is_contrary(given):
                return f"{name}={given}"
        return ""


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "torch's watchdog ends each process whose communicator saw an error, a minute after it",
        former_name="NCCL_ASYNC_ERROR_HANDLING",
    ),
    Variable(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "torch's monitor ends the process when the watchdog is held up, as it is in an abort, and"
        " each process that joins after an error",
        _OFF,
    ),
    Variable(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "torch's watchdog ends the process with errors of NCCL that an abort has caused",
        _OFF,
    ),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "after an error every rank writes a dump, and waits for the others to do so",
        _OFF,
    ),
    Variable("TORCH_FR_DUMP_ON_TIMEOUT", "0", "the same, as torch 2.15 calls it", _OFF),
    Variable(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "0",
        "after an error torch's watchdog sleeps four times as long, with a lock that each operation"
        " takes as it is enqueued: the thread that trains would stand in it for a minute, and no"
        " close of an epoch gets it out",
    ),
    Variable("TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", "0", "the same, as torch 2.15 calls it"),
    Variable(
        "TORCH_NCCL_PROPAGATE_ERROR",
        "0",
        "an error is told to all ranks through a store that outlives the epoch it belongs to",
        _OFF,
    ),
    Variable(
        "TORCH_NCCL_DESYNC_DEBUG",
        "0",
        "it writes to the store in every operation, and there is none while training",
        _OFF,
        former_name="NCCL_DESYNC_DEBUG",
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        "a wait for an operation holds the thread, and no close of an epoch gets it out",
        _OFF,
        former_name="NCCL_BLOCKING_WAIT",
    ),
    Variable(
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        "0",
        "memory is registered with communicators, which a recovery replaces",
        _OFF,
        former_name="NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    ),
    Variable(
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        "0",
        "communicators are then made on the side, and may not be there yet when training begins, or"
        " when they have to be aborted",
        _OFF,
    ),
    Variable(
        "TORCH_NCCL_TEARDOWN_ON_TIMEOUT",
        "0",
        "torch 2.15 ends the process when an operation has timed out",
        _OFF,
    ),
    Variable(
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC",
        "0",
        "an abort writes a dump first",
        _OFF,
        otherwise=Otherwise.WARNED,
    ),
    Variable(
        "TORCH_NCCL_NAN_CHECK",
        "0",
        "a kernel asserts on what an aborted operation leaves, which costs the process its context",
        _OFF,
        otherwise=Otherwise.WARNED,
    ),
    Variable(
        "NCCL_COMM_BLOCKING",
        "1",
        "it overrules torch: communicators are then made on the side",
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        "0",
        "each launch holds the thread until it is over, and no close of an epoch gets it out",
        otherwise=Otherwise.WARNED,
    ),
    Variable(
        "NCCL_RUNTIME_CONNECT",
        "0",
        "NCCL then connects at the first use of a communicator, in the thread that trains, and"
        " waits there for peers that may be seconds behind",
        otherwise=Otherwise.WARNED,
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "torch's flight recorder is off without a buffer, and nothing tells who hangs",
        former_name="TORCH_NCCL_TRACE_BUFFER_SIZE",
        contrary=("0",),
    ),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG",
        "OFF",
        "DETAIL turns the watchdog's error handling on again, and wraps every group",
        ("info",),
    ),
    Variable(
        "NCCL_NVLS_ENABLE",
        "0",
        "NVRx asks for it: NVLink SHARP's multicast memory belongs to all GPUs of a communicator,"
        " and may not be given back when one of them is gone",
        otherwise=Otherwise.WARNED,
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "Megatron-LM wants it with tensor or context parallelism on GPUs before Blackwell",
        otherwise=Otherwise.KEPT,
    ),
)


@dataclass(frozen=True)
class RefusedVersions:
    """Versions of NCCL from ``first`` to ``last``, both included."""

    shown: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    reason: str


REFUSED_VERSIONS: tuple[RefusedVersions, ...] = (
    RefusedVersions(
        "before 2.26.2",
        (0, 0, 0),
        (2, 26, 1),
        "to abort communicators may hang (pytorch#149153; before 2.22 they cannot be aborted as"
        " one group, pytorch#150690)",
    ),
    RefusedVersions(
        "2.28.3 to 2.28.8",
        (2, 28, 3),
        (2, 28, 8),
        "communicators cannot be remade in a process that has aborted some (NVRx leaves these"
        " versions out)",
    ),
)


def is_needed(communicator: str) -> bool:
    """Return whether members need these values with this value of ``--deadpool-communicator``: what
    plays NCCL reads some of them, too."""
    return communicator != "gloo"


def complete(environment: MutableMapping[str, str]) -> None:
    """Set what is not set; what the user has set stays."""
    for variable in VARIABLES:
        # The name of today wins over the former one, which is as much the user's.
        if variable.former_name not in environment:
            environment.setdefault(variable.name, variable.value)


def complaint(environment: Mapping[str, str]) -> str:
    """Returns one line about the values that a recovery cannot have; empty without one."""
    found = [
        (variable, other)
        for variable, other in _other_values(environment)
        if variable.otherwise is Otherwise.REFUSED
    ]
    if not found:
        return ""
    variable, other = found[0]
    more = ", ".join(other for _, other in found[1:])
    return (
        f"{other} cannot be protected with NCCL: {variable.reason}; unset it, or set it to"
        f" {variable.value}" + (f" (refused as well: {more})" if more else "")
    )


def warnings(environment: Mapping[str, str]) -> list[str]:
    """Returns a line for each value that is taken although it may cost a recovery."""
    return [
        f"{other} is taken as set, and recoveries may fail with it: {variable.reason}"
        for variable, other in _other_values(environment)
        if variable.otherwise is Otherwise.WARNED
    ]


def in_force(environment: Mapping[str, str]) -> str:
    """Returns all variables of the table with their values here, for a log."""
    return " ".join(
        f"{variable.name}={environment[variable.name]}"
        for variable in VARIABLES
        if variable.name in environment
    )


def version_complaint(version: tuple[int, int, int]) -> str:
    """Returns one line about a version of NCCL that cannot be recovered with; empty if it can."""
    for refused in REFUSED_VERSIONS:
        if refused.first <= version <= refused.last:
            found = ".".join(map(str, version))
            return (
                f"NCCL {found} cannot be protected: with NCCL {refused.shown} {refused.reason};"
                " use a torch that brings another one, 2.28.9 for example"
            )
    return ""


def as_markdown() -> str:
    """Returns both tables for people."""
    rows = [
        f"| `{_code(variable)}` | {variable.value} | {variable.reason} |"
        f" {', '.join(variable.contrary)}{' is ' if variable.contrary else ''}"
        f"{variable.otherwise.value} |"
        for variable in VARIABLES
    ]
    versions = [f"| {refused.shown} | {refused.reason} |" for refused in REFUSED_VERSIONS]
    lines = (
        *("| variable | members get | why | another value |", "| --- | --- | --- | --- |", *rows),
        *("", "| NCCL | why refused |", "| --- | --- |", *versions),
    )
    return "\n".join(lines) + "\n"


def _code(variable: Variable) -> str:
    return f"{variable.name}`, `{variable.former_name}" if variable.former_name else variable.name


def _other_values(environment: Mapping[str, str]) -> Iterable[tuple[Variable, str]]:
    for variable in VARIABLES:
        if other := variable.other_value(environment):
            yield variable, other
