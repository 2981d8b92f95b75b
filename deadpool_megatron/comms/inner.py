"""The seam between reconfigurable groups and the communicators of an epoch.

A :class:`Fabric` holds the sockets and devices that all inner groups of a kind share during an
epoch, and is aborted as a whole; an :class:`InnerGroup` is a communicator on it. A call raises
:class:`EpochClosed` or :class:`CommunicatorFault` when peers fail. Groups forward the methods of
torch's ProcessGroup that communicate. This module also lists these methods, and the versions of
torch on which they were tested.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from deadpool_megatron.layout.descriptions import group_name

_RETURNS_A_WORK = re.compile(r"-> \S*\bWork\b")

#: every method of the installed torch that starts an operation and returns a Work; they differ
#: between versions
COMMUNICATION: tuple[str, ...] = tuple(
    name
    for name in dir(ProcessGroup)
    if name != "_end_coalescing"
    and _RETURNS_A_WORK.search(getattr(ProcessGroup, name).__doc__ or "")
)

SENDS = frozenset({"send"})
RECEIVES = frozenset({"recv", "recv_anysource"})
POINT_TO_POINT = SENDS | RECEIVES
#: operations that open a group of NCCL inside torch, and leave it open for their thread when NCCL
#: refuses (ProcessGroupNCCL.cpp; torch/csrc/cuda/nccl.cpp: all2all, gather, scatter)
_GROUPED = re.compile(r"gather|scatter|.*(all_to_all|alltoall).*|.*coalesced")
OPENS_A_GROUP = POINT_TO_POINT | frozenset(filter(_GROUPED.fullmatch, COMMUNICATION))
#: the versions of torch, as (major, minor), on which all tests run
ALL_TESTS = frozenset({(2, 13)})
#: the versions on which scripts/compat.sh runs its tests; docs/compatibility.md has the results
SOME_TESTS = frozenset({(2, 14), (2, 15)})
#: older versions cannot make a backend whose operations raise
OLDEST = (2, 10)


class EpochClosed(BaseException):
    """The epoch of a communication call is closed; no result of the call may be used.

    Derives from BaseException so that a training script's ``except Exception`` does not swallow it.
    """

    def __init__(self, epoch: int, operation: str) -> None:
        super().__init__(f"epoch {epoch} was closed (in {operation})")
        self.epoch = epoch
        self.operation = operation


class CommunicatorFault(RuntimeError):
    """A failed peer, a failed connection or a timeout, in an epoch that was not closed in time."""

    def __init__(self, group: str, operation: str, cause: str) -> None:
        super().__init__(f"communicator of group {group!r} failed in {operation}: {cause}")
        self.group = group
        self.operation = operation
        self.cause = cause


@dataclass(frozen=True)
class GroupSpec:
    """The specification of a communicator; equal on all its ranks but for ``rank``.

    ``ranks`` are global ranks in group order, ``rank`` is the position of this rank, ``timeout``
    is a timeout that was set explicitly (None: the fabric's default) and ``requested_timeout`` that
    of the group's creation; ``colour`` makes it a split of WORLD's communicator.
    """

    description: str
    name: str
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    timeout: timedelta | None = None
    requested_timeout: timedelta | None = None
    options: Any = None
    colour: int | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def place(self) -> str:
        """Return the group's name in diagnostics, as many groups share a description."""
        return group_name(self.description, self.ranks)


@dataclass(frozen=True)
class Position:
    """The progress of a device with the operations of one group, by numbers from 1 in each epoch.

    ``collective``: the group has had no messages between two of its ranks, so that equal numbers
    mean the same operation on all ranks. Otherwise a number may be that of a collective or of a
    message, which are counted separately. ``started``: None where that is not known.
    """

    enqueued: int
    started: int | None
    completed: int
    collective: bool = True


@dataclass(frozen=True)
class OperationCounts:
    """The operations that the host has begun in a group, by numbers from 1 in each epoch.

    Collectives are the same on all ranks of the group, messages are not.
    """

    collectives: int
    messages: int


class InnerGroup(ABC):
    """A communicator. It is used by the thread that communicates."""

    #: whether batch_isend_irecv must be wrapped in start/end coalescing
    coalesces: bool = False
    #: whether operations complete locally, without peers
    detached: bool = False
    #: see GroupSpec.place; empty where no wait is possible
    place: str = ""
    #: operations that the host has begun
    collectives: int = 0
    messages: int = 0

    @abstractmethod
    def forward(
        self, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dist.Work | None:
        """Start ``operation`` (a method name of ProcessGroup) and return its Work.

        Raises EpochClosed or CommunicatorFault; errors of the caller (shapes, types) unchanged.
        """

    @abstractmethod
    def backend(self) -> Any:
        """Return the c10d Backend, for code that asks a group for it."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a bookkeeping method of the inner ProcessGroup that does not communicate."""
        raise NotImplementedError(f"{method} is not available on a {type(self).__name__}")

    def monitored_barrier(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        """Wait at a barrier that names missing ranks; gloo only."""
        raise NotImplementedError(f"monitored_barrier on a {type(self).__name__}")

    def number(self, operation: str) -> int:
        """Count an operation; return its number among those of its kind."""
        if operation in POINT_TO_POINT:
            self.messages += 1
            return self.messages
        self.collectives += 1
        return self.collectives

    def operation_counts(self) -> OperationCounts | None:
        """Return the operations that the host has begun; None where a device runs them. Any
        thread."""
        return None

    def set_timeout(self, timeout: timedelta) -> None:  # noqa: B027
        """Use ``timeout`` for operations that start from now on."""

    def allow_long_waits(self, allows_long_waits: bool) -> None:  # noqa: B027
        """Let later operations wait for long work of a peer, or only the usual time."""

    def close(self) -> None:  # noqa: B027
        """Drop the communicator; may block, so it is only called where blocking does no harm."""


class Fabric(ABC):
    """The resources that the inner groups of a kind share during an epoch."""

    @abstractmethod
    def create(self, spec: GroupSpec, store: Store) -> InnerGroup:
        """Return a communicator that is connected to all peers; blocks until every rank takes part.

        ``store`` is not used after this call.
        """

    def skip_split(self) -> None:  # noqa: B027
        """Take part in a split of WORLD's communicator without a part for this process."""

    @abstractmethod
    def abort(self) -> None:
        """Make pending operations of all groups end. Any thread, any number of times."""

    def aborting(self) -> bool:
        """Return whether another thread has not finished an abort."""
        return False

    def unusable_reason(self) -> str:
        """After abort: return the reason why this process must not communicate again, or
        nothing."""
        return ""

    def fault(self) -> tuple[str, str, str] | None:
        """Return a fault that no thread has met, as (group, operation, text). Any thread."""
        return None

    def positions(self) -> Mapping[str, Position] | None:
        """Return the device's progress with each group; None where the host itself waits in
        operations. Costs about a millisecond, so it is for a process that makes no progress.
        """
        return None

    @abstractmethod
    def is_quiescent(self) -> bool:
        """After abort: return whether no peer's data can arrive in local memory any more."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources; blocks until operations have ended, so only the reaper calls it."""


def torch_warning(version: str) -> str:
    """Return a warning about ``version`` of torch; empty when all tests run on it.

    The package has no upper bound for an installer, which must not replace the torch of an image.
    Raises RuntimeError for a version that cannot work.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"torch {version}: cannot tell which version that is"
    number = int(found[1]), int(found[2])
    if "allreduce" not in COMMUNICATION:
        raise RuntimeError(f"torch {version} does not say which methods communicate")
    if number < OLDEST:
        raise RuntimeError(f"torch {version} is too old: {_version_text(OLDEST)} is the oldest")
    if number in ALL_TESTS:
        return ""
    if number in SOME_TESTS:
        return f"torch {version}: only some tests have been run on it (docs/compatibility.md)"
    run = ", ".join(map(_version_text, sorted(ALL_TESTS | SOME_TESTS)))
    return f"torch {version}: the tests have been run on {run}; groups may lack its newest methods"


def _version_text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
