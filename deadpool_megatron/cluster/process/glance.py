"""A look at something that may hang for as long as a network file system does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Glance(Generic[T]):
    """Reads in a thread of its own, one reading at a time. For one caller."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._found: list[T] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def look(self, limit_seconds: float) -> T:
        """Returns what a reading found that has just ended. Raises what the reading raised, and
        TimeoutError when it takes longer; it then continues, for the next look.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._thread.join(limit_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {limit_seconds:g} s")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._found.pop()

    def _work(self) -> None:
        try:
            self._found.append(self._read())
        except Exception as error:
            self._error = error
