"""The store in which the communicators of an epoch meet, for torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store


class Meeting(Protocol):
    """The values that the roles of an epoch exchange; see MemberStore."""

    def set(self, epoch: int, key: str, value: bytes) -> None:
        """Write a value."""

    def has(self, epoch: int, keys: Sequence[str]) -> bool:
        """Return whether all values are there."""

    def wait(self, epoch: int, keys: Sequence[str], deadline_seconds: float) -> None:
        """Wait for values. Raises RuntimeError when the epoch is closed, or after the deadline."""

    def get(self, epoch: int, key: str, deadline_seconds: float) -> bytes:
        """Return a value; waits and raises as :meth:`wait` does."""


class EpochStore(Store):
    """The store of ``epoch``, which torch calls from any thread, without the interpreter's lock.

    torch finds its methods only while this object lives: keep it as long as any group of the epoch.
    No communicator uses the missing methods (counters, deletion, queues); torch raises for them.
    """

    def __init__(self, meeting: Meeting, epoch: int, timeout_seconds: float) -> None:
        super().__init__()
        self._meeting = meeting
        self._epoch = epoch
        self._timeout_seconds = timeout_seconds

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._meeting.set(self._epoch, key, data)

    def get(self, key: str) -> bytes:
        return self._meeting.get(self._epoch, key, self._timeout_seconds)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout_seconds if timeout is None else timeout.total_seconds()
        self._meeting.wait(self._epoch, keys, limit)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._meeting.has(self._epoch, keys)

    def has_extended_api(self) -> bool:
        return False


def meet(store: Store, name: str, rank: int, size: int, value: str = "") -> bool:
    """Wait for all ranks, as a barrier without a communicator; return whether their values are
    equal."""
    store.set(f"{name}/{rank}", value)
    if rank == 0:
        values = {store.get(f"{name}/{other}") for other in range(size)}
        store.set(name, str(len(values)))
    return store.get(name) == b"1"
