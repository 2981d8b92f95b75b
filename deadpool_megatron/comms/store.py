"""The store in which the communicators of one epoch meet, as torch knows it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store


class Meeting(Protocol):
    """The place where the roles of an epoch leave values for each other; see MemberStore."""

    def set(self, epoch: int, key: str, value: bytes) -> None:
        """Write a value."""

    def has(self, epoch: int, keys: Sequence[str]) -> bool:
        """Returns whether all values are there."""

    def wait(self, epoch: int, keys: Sequence[str], deadline_seconds: float) -> None:
        """Wait for values. Raises RuntimeError when the epoch is closed, or after the deadline."""

    def get(self, epoch: int, key: str, deadline_seconds: float) -> bytes:
        """Returns a value; waits and raises as :meth:`wait` does."""


class EpochStore(Store):
    """The store of ``epoch``. torch calls it from any thread, without the interpreter's lock, and
    finds the methods only as long as this object lives: keep it as long as any group of the epoch.

    What is not here (counters, deletion, queues) no communicator asks for; torch raises then.
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
    """Return when all ranks are here, as a barrier does but without a communicator; the answer is
    whether all have brought the same value."""
    store.set(f"{name}/{rank}", value)
    if rank == 0:
        brought = {store.get(f"{name}/{other}") for other in range(size)}
        store.set(name, str(len(brought)))
    return store.get(name) == b"1"
