"""When things happened, as a bench sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Moments:
    """When the agents heard of something: first and last, by the wall clock."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int], list[float]] = {}

    def note(self, kind: str, number: int) -> None:
        """One agent has heard of it now."""
        self._times.setdefault((kind, number), []).append(time.time())

    def count(self, kind: str, number: int) -> int:
        """How many have."""
        return len(self._times.get((kind, number), ()))

    def first(self, kind: str, number: int) -> float:
        """When the first one did."""
        return min(self._times[kind, number])

    def last(self, kind: str, number: int) -> float:
        """When the last one did."""
        return max(self._times[kind, number])


async def until(what: str, ready: Callable[[], object], limit_seconds: float) -> None:
    """Wait for a condition. Raises TimeoutError that names it."""
    limit = time.monotonic() + limit_seconds
    while not ready():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {limit_seconds:g} s for {what}")
        await asyncio.sleep(0.02)
