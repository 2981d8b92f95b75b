"""A moment without processes, descriptors or memory to be had: tried again, but not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from deadpool_megatron.vault.errors import is_shortage

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
Made = TypeVar("Made")


async def patiently(make: Callable[[], Made], limit_seconds: float) -> Made:
    """Returns what ``make`` returns, called again with growing pauses while something is short.

    Raises its OSError when that is none of a shortage, or when the time is over; whatever else
    ``make`` raises, it raises at once.
    """
    pause, limit = FIRST_PAUSE_SECONDS, time.monotonic() + limit_seconds
    while True:
        try:
            return make()
        except OSError as error:
            if not is_shortage(error) or time.monotonic() + pause > limit:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
