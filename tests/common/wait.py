"""Waiting for what other processes and threads do. Limits are for hangs: no test waits to pass."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# A busy machine may take long.
MAX_WAIT_SECONDS = 60.0
_LOOK_SECONDS = 0.01


def wait_for(
    what: str,
    ready: Callable[[], T],
    seconds: float = MAX_WAIT_SECONDS,
    failure: Callable[[], str] = str,
) -> T:
    """Poll until ``ready()`` is true; returns what it answered.

    ``failure``: why it can no longer come, if so. Raises AssertionError with ``what``.
    """
    limit = time.monotonic() + seconds
    while True:
        why = failure()  # before the last look: what came just before the end counts
        if found := ready():
            return found
        assert not why, f"{why} before: {what}"
        assert time.monotonic() < limit, f"waited {seconds:g} s for: {what}"
        time.sleep(_LOOK_SECONDS)


async def until(ready: Callable[[], object], seconds: float = MAX_WAIT_SECONDS) -> None:
    """The same on a running loop. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not ready():
            await asyncio.sleep(_LOOK_SECONDS)
