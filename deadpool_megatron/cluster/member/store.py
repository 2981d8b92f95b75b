"""A member's end of the store in which communicators meet."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deadpool_megatron.wire import store


class StoreError(RuntimeError):
    """The epoch is closed, a value did not come in time, or one is too large."""


class MemberStore:
    """Any thread. ``send`` is the way to the agent and does not block.

    Holds what was asked for in the newest epoch that was asked in.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._epoch = 0
        self._closed = 0
        self._values: dict[str, str] = {}
        self._wanted: set[str] = set()

    def set(self, epoch: int, key: str, value: bytes) -> None:
        """Write a value, once. Raises StoreError."""
        if len(value) > store.MAXIMUM_VALUE_BYTES or len(key) > store.MAXIMUM_KEY_CHARACTERS:
            raise StoreError(f"key {key[:80]!r} or its {len(value)} bytes are over the limit")
        text = base64.b64encode(value).decode()
        with self._changed:
            self._enter(epoch)
            self._values[key] = text
            self._changed.notify_all()
        self._send(store.pack(epoch, {key: text}))

    def has(self, epoch: int, keys: Sequence[str]) -> bool:
        """Returns whether all values have arrived; they are asked for. Raises StoreError."""
        with self._changed:
            self._ask(epoch, keys)
            return all(key in self._values for key in keys)

    def wait(self, epoch: int, keys: Sequence[str], deadline_seconds: float) -> None:
        """Return when all values are written.

        Raises StoreError at once when the epoch is or gets closed, and after ``deadline_seconds``.
        """
        limit = time.monotonic() + deadline_seconds
        with self._changed:
            self._ask(epoch, keys)
            for key in keys:
                while key not in self._values:
                    left = limit - time.monotonic()
                    if left <= 0:
                        raise StoreError(f"nobody wrote {key!r} within {deadline_seconds:g} s")
                    self._changed.wait(left)
                    self._check(epoch)

    def get(self, epoch: int, key: str, deadline_seconds: float) -> bytes:
        """Returns a value, as soon as it is written; raises as :meth:`wait` does."""
        self.wait(epoch, [key], deadline_seconds)
        with self._changed:
            self._check(epoch)
            return base64.b64decode(self._values[key])

    def take(self, message: Mapping[str, Any]) -> None:
        """Values from the agent. Raises ValueError when they are malformed."""
        said = store.unpack(message)
        with self._changed:
            if said.epoch == self._epoch and said.epoch > self._closed:
                self._values |= said.values
                self._changed.notify_all()

    def close(self, epoch: int) -> None:
        """End every wait in ``epoch`` and those before."""
        with self._changed:
            self._closed = max(self._closed, epoch)
            if self._epoch <= self._closed:
                self._values, self._wanted = {}, set()
            self._changed.notify_all()

    # The lock is held.

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch, self._values, self._wanted = epoch, {}, set()
        self._check(epoch)

    def _check(self, epoch: int) -> None:
        if epoch <= self._closed or epoch < self._epoch:
            raise StoreError(f"epoch {epoch} is closed")

    def _ask(self, epoch: int, keys: Sequence[str]) -> None:
        self._enter(epoch)
        want = {store.folder_of(key) for key in keys if key not in self._values} - self._wanted
        if want:
            self._wanted |= want
            self._send(store.pack(epoch, {}, sorted(want)))
