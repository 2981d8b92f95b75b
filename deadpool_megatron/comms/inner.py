"""The seam: what stands behind a reconfigurable group during one epoch, and torch's side of it.

A :class:`Fabric` is what all inner groups of one kind share during one epoch (sockets, devices) and
is aborted as a whole; an :class:`InnerGroup` is one communicator on it. A call raises
:class:`EpochClosed` or :class:`CommunicatorFault` when peers fail. Groups forward the methods of
torch's ProcessGroup that communicate, and say on which versions of torch that was tried.
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

from deadpool_megatron.layout.words import group_name

_ANSWERS_A_WORK = re.compile(r"-> \S*\bWork\b")

#: every method that starts an operation and answers a Work, of the class at hand: names come and go
#: between versions of torch
COMMUNICATION: tuple[str, ...] = tuple(
    name
    for name in dir(ProcessGroup)
    if name != "_end_coalescing"
    and _ANSWERS_A_WORK.search(getattr(ProcessGroup, name).__doc__ or "")
)

SENDS = frozenset({"send"})
RECEIVES = frozenset({"recv", "recv_anysource"})
POINT_TO_POINT = SENDS | RECEIVES
#: what opens a group of NCCL inside torch, and leaves it open for its thread when NCCL refuses
#: (ProcessGroupNCCL.cpp; torch/csrc/cuda/nccl.cpp: all2all, gather, scatter)
OPENS_A_GROUP = POINT_TO_POINT | frozenset(
    name
    for name in COMMUNICATION
    if name in ("gather", "scatter")
    or "all_to_all" in name
    or "alltoall" in name
    or name.endswith("coalesced")
)
#: (major, minor): all tests run on these
ALL_TESTS = frozenset({(2, 13)})
#: and those that scripts/compat.sh starts on these; docs/compatibility.md says what came of it
SOME_TESTS = frozenset({(2, 14), (2, 15)})
#: torch before it cannot make a backend whose operations raise
OLDEST = (2, 10)


class EpochClosed(BaseException):
    """The epoch in which a communication call was made is closed; nothing of it may be used.

    Derives from BaseException so that a training script's ``except Exception`` does not swallow it.
    """

    def __init__(self, epoch: int, operation: str) -> None:
        super().__init__(f"epoch {epoch} was closed (in {operation})")
        self.epoch = epoch
        self.operation = operation


class CommunicatorFault(RuntimeError):
    """A peer, connection or timeout fault, and nobody closed the epoch within the deadline."""

    def __init__(self, group: str, operation: str, cause: str) -> None:
        super().__init__(f"communicator of group {group!r} failed in {operation}: {cause}")
        self.group = group
        self.operation = operation
        self.cause = cause


@dataclass(frozen=True)
class GroupSpec:
    """Everything that is needed to make one communicator; equal on all its ranks but for ``rank``.

    ``ranks`` are global ranks in group order, ``rank`` is the own position among them, ``timeout``
    is a timeout that was set explicitly (None: the fabric's default) and ``requested_timeout`` the
    one the group was created with; ``colour`` what makes it a split of WORLD's communicator.
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
        """Number of ranks."""
        return len(self.ranks)

    @property
    def place(self) -> str:
        """Return what diagnosis calls the group: one description is that of many groups."""
        return group_name(self.description, self.ranks)


@dataclass(frozen=True)
class Position:
    """The progress of a device with the operations of one group, by numbers from 1 in each epoch.

    ``collective``: the group has had no messages between two of its ranks, so that equal numbers
    mean the same operation on all ranks. Else a number is that of the last operation, whether it
    was a collective or a message, and each of the two kinds is counted by itself. ``started``: None
    where that is not known.
    """

    enqueued: int
    started: int | None
    completed: int
    collective: bool = True

    @property
    def is_pending(self) -> bool:
        """Return whether an operation was enqueued and has not ended."""
        # The first collective after the ninth message has a lower number than what has ended.
        return self.enqueued != self.completed


@dataclass(frozen=True)
class Begun:
    """The operations that the host has begun in one group, by numbers from 1 in each epoch:
    collectives, which are the same ones on all ranks, and messages, which are not.
    """

    collectives: int
    messages: int


class InnerGroup(ABC):
    """One communicator. Used by the thread that communicates; ``backend`` may be None."""

    #: whether batch_isend_irecv must be wrapped in start/end coalescing
    coalesces: bool = False
    #: whether operations complete locally, without peers
    detached: bool = False
    #: see GroupSpec.place; empty where nobody can wait
    place: str = ""
    #: operations that the host has begun
    collectives: int = 0
    messages: int = 0

    @abstractmethod
    def forward(
        self, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dist.Work | None:
        """Start ``operation`` (a method name of ProcessGroup); answers its Work.

        Raises EpochClosed or CommunicatorFault; errors of the caller (shapes, types) as they are.
        """

    @abstractmethod
    def backend(self) -> Any:
        """The c10d Backend, for code that asks a group for it."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a bookkeeping method of the inner ProcessGroup that does not communicate."""
        raise NotImplementedError(f"{method} is not available on a {type(self).__name__}")

    def monitored_barrier(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        """Blocking barrier that names missing ranks; gloo only."""
        raise NotImplementedError(f"monitored_barrier on a {type(self).__name__}")

    def number(self, operation: str) -> int:
        """Count an operation; returns its number among those of its kind."""
        if operation in POINT_TO_POINT:
            self.messages += 1
            return self.messages
        self.collectives += 1
        return self.collectives

    def begun(self) -> Begun | None:
        """Return what the host has begun; None where a device runs the operations. Any thread."""
        return None

    def set_timeout(self, timeout: timedelta) -> None:  # noqa: B027
        """Use ``timeout`` for operations that start from now on."""

    def be_patient(self, is_patient: bool) -> None:  # noqa: B027
        """From now on an operation may have to wait for what a peer does on purpose, or not."""

    def close(self) -> None:  # noqa: B027
        """Drop the communicator; may block, so only called where that does no harm."""


class Fabric(ABC):
    """The base that the inner groups of one kind and one epoch share."""

    @abstractmethod
    def create(self, spec: GroupSpec, store: Store) -> InnerGroup:
        """Make one communicator, connected to all peers; blocks until every rank takes part.

        ``store`` is used up to the return of this call only.
        """

    def leave_out(self) -> None:  # noqa: B027
        """Take part in a split of WORLD's communicator that makes none for this process."""

    @abstractmethod
    def abort(self) -> None:
        """Make pending operations of all groups end. Any thread, any number of times."""

    def aborting(self) -> bool:
        """Return whether an abort is still under way in another thread."""
        return False

    def ruin(self) -> str:
        """After abort: why this process must not communicate again; empty when it may."""
        return ""

    def fault(self) -> tuple[str, str, str] | None:
        """A fault that no thread has run into, as (group, operation, text). Any thread."""
        return None

    def positions(self) -> Mapping[str, Position] | None:
        """Return how far the device is with each group; None where the host itself waits in
        operations. Costs a millisecond or so: for a process that stands still.
        """
        return None

    @abstractmethod
    def quiescent(self) -> bool:
        """After abort: True if no peer's data can arrive in local memory any more."""

    @abstractmethod
    def close(self) -> None:
        """Free what is shared; blocks until operations have ended, so only the reaper calls it."""


def remark_on_torch(version: str) -> str:
    """Return what a user should know of ``version`` of torch; empty when all tests run on it.

    The package asks an installer for no upper bound: it must not replace the torch of an image.
    Raises RuntimeError for one that cannot work.
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
