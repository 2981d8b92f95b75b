"""Times of events, as a bench sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Moments:
    """Times at which agents received messages: first and last, by the wall clock."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int], list[float]] = {}

    def note(self, kind: str, number: int) -> None:
        """Note that an agent has received it now."""
        self._times.setdefault((kind, number), []).append(time.time())

    def count(self, kind: str, number: int) -> int:
        """Return the number of agents that have received it."""
        return len(self._times.get((kind, number), ()))

    def first(self, kind: str, number: int) -> float:
        """Return when the first agent received it."""
        return min(self._times[kind, number])

    def last(self, kind: str, number: int) -> float:
        """Return when the last agent received it."""
        return max(self._times[kind, number])


async def until(condition: str, ready: Callable[[], object], limit_seconds: float) -> None:
    """Wait for a condition. Raises TimeoutError that names it."""
    limit = time.monotonic() + limit_seconds
    while not ready():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {limit_seconds:g} s for {condition}")
        await asyncio.sleep(0.02)
