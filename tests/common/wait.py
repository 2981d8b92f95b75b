"""Waits for other processes and threads. Limits are for hangs: no test waits to pass."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# A busy machine may take long.
MAX_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.01


def wait_for(
    condition: str,
    ready: Callable[[], T],
    seconds: float = MAX_WAIT_SECONDS,
    failure: Callable[[], str] = str,
) -> T:
    """Poll until ``ready()`` is true, and return its value.

    ``failure``: the reason if it can no longer come true. Raises AssertionError with ``condition``.
    """
    limit = time.monotonic() + seconds
    while True:
        reason = failure()  # before the last poll, as it may come true just before the end
        if found := ready():
            return found
        assert not reason, f"{reason} before: {condition}"
        assert time.monotonic() < limit, f"waited {seconds:g} s for: {condition}"
        time.sleep(_POLL_SECONDS)


async def until(ready: Callable[[], object], seconds: float = MAX_WAIT_SECONDS) -> None:
    """Wait likewise in a running loop. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not ready():
            await asyncio.sleep(_POLL_SECONDS)
