"""The ProcessGroup that Megatron holds: the same object for the whole run.

torch accepts a Python subclass of ProcessGroup from a backend's creator and uses that very object
as the group. Ours forwards to an inner group that is exchanged when the membership changes, so the
dozens of references that a training framework captures never go stale.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup

from deadpool_megatron.comms.groups.detached import DetachedGroup
from deadpool_megatron.comms.inner import GroupSpec, InnerGroup
from deadpool_megatron.comms.operations import COMMUNICATION

#: What C++ reads as the name of the backend. It takes what a group called "gloo" has for an object
#: of gloo's class, without a look at it (DistributedDataParallel, for the number of threads).
NAME_IN_CPP = "deadpool"
#: tensors there have no data to send
_NO_DATA = torch.device("meta")


class Owner(Protocol):
    """The listener to which a group tells of itself: its Communicators."""

    def forget(self, group: ReconfigurableGroup) -> None:
        """The group was destroyed by its user."""


def show_stand_in(group: ProcessGroup, rank: int, size: int) -> None:
    """Let C++ find a backend when it asks ``group`` for one.

    Newer versions of torch ask every new group for its default backend. A group of ours has none of
    its own in the eyes of C++, and the inner one must not be shown there: C++ keeps the first
    backend of a type for ever, and a call through one of an old epoch would reach peers of an old
    epoch. So what is found is a backend whose collectives raise. It is registered for a device on
    which nothing is ever sent, and C++ chooses the backend of an operation by the device of its
    tensors. An operation that goes past the methods of our group therefore ends in torch's own "No
    backend type associated with device type cpu". It has no threads and no sockets: a process may
    still fork.
    """
    fake: Any = FakeProcessGroup
    options = fake.Options()
    options.error_on_collective = True
    cpp: Any = ProcessGroup
    kind = ProcessGroup.BackendType.CUSTOM
    cpp._register_backend(group, _NO_DATA, kind, fake._create_internal(rank, size, options))
    cpp._set_default_backend(group, kind)


class ReconfigurableGroup(ProcessGroup):
    """A process group whose communicator can be exchanged.

    ``ranks`` are global ranks in group order; ``transport`` is that of ``fabric_of``;
    ``requested`` the backend name that the user asked for. Methods that communicate are added below
    from the class at hand. Starts detached.
    """

    def __init__(
        self,
        owner: Owner,
        ranks: tuple[int, ...],
        rank: int,
        transport: str,
        requested: str,
        device: torch.device,
        requested_timeout: timedelta | None,
        options: Any,
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        show_stand_in(self, rank, len(ranks))
        self.ranks = ranks
        self.transport = transport
        self.requested = requested
        self.options = options
        self.explicit_timeout: timedelta | None = None
        self._owner = owner
        self._rank = rank
        self._device = device
        self._requested_timeout = requested_timeout
        self._name = "unnamed"
        self._bound_device: torch.device | None = None
        self.inner: InnerGroup = DetachedGroup(self.spec())

    def spec(self) -> GroupSpec:
        """Return what an inner group is made from; description and name as they are now."""
        return GroupSpec(
            description=self.description,
            name=self._name,
            ranks=self.ranks,
            rank=self._rank,
            device=self._bound_device or self._device,
            timeout=self.explicit_timeout,
            requested_timeout=self._requested_timeout,
            options=self.options,
        )

    def renumber(self, ranks: tuple[int, ...], rank: int) -> None:
        """Become the same group of another role; only while detached or closed."""
        if len(ranks) != len(self.ranks):
            raise ValueError(f"{self.description}: {len(self.ranks)} ranks cannot become {ranks}")
        self.ranks = ranks
        self._rank = rank
        if self.inner.detached:
            self.inner = DetachedGroup(self.spec())

    @property
    def description(self) -> str:
        """The group's description, or its name where it has none."""
        description = ProcessGroup.group_desc.fget(self)  # type: ignore[attr-defined]
        return self._name if description in ("", "undefined") else str(description)

    # -- what c10d and its users ask of a group ------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.ranks)

    # How C++ callers (functional collectives) ask the same.
    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return len(self.ranks)

    def getBackendName(self) -> str:
        return NAME_IN_CPP

    def getGroupName(self) -> str:
        return self._name

    def name(self) -> str:
        return self.requested

    # The base class keeps the name in its backends, and none here knows it.
    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device = device

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._device.type)]

    @property
    def pg_options(self) -> Any:
        """The options the group was created with."""
        return self.options

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type not in {self._device.type, "cpu"}:
            raise RuntimeError(f"no backend for device {device} in group {self.description}")
        return self.inner.backend()

    # Its name from torch 2.15 on.
    def get_backend(self, device: torch.device) -> Any:
        return self._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Timeout of later operations; remembered over exchanges of the inner group."""
        self.explicit_timeout = timeout
        self.inner.set_timeout(timeout)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self.inner.monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner.call("_start_coalescing", device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.inner.call("_end_coalescing", device)

    def _get_sequence_number_for_group(self) -> int:
        return int(self.inner.call("_get_sequence_number_for_group"))

    def _set_sequence_number_for_group(self) -> None:
        """Done when an inner group is made."""

    def _wait_for_pending_works(self) -> None:
        """Only completion hooks need this, and none are registered."""

    def _has_hooks(self) -> bool:
        return False

    def abort(self) -> None:
        """Nothing: epochs are closed as a whole, by Communicators.interrupt."""

    def shutdown(self) -> None:
        """Take the goodbye of destroy_process_group; fine on a detached group."""
        self._owner.forget(self)


def _forwarding(operation: str) -> Callable[..., Any]:
    def method(self: ReconfigurableGroup, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(operation, args, kwargs)

    method.__name__ = operation
    method.__qualname__ = f"ReconfigurableGroup.{operation}"
    method.__doc__ = f"ProcessGroup.{operation} on the inner group of the moment."
    return method


for _operation in COMMUNICATION:
    setattr(ReconfigurableGroup, _operation, _forwarding(_operation))
