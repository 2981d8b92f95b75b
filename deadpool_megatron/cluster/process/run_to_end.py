"""The end of a process whose threads may wait for a disk that does not answer."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any


def run_to_end(main: Coroutine[Any, Any, int], thread_seconds: float) -> int:
    """As ``asyncio.run``, which waits for what is under way in the loop's threads, but no longer
    than ``thread_seconds`` after ``main`` is over: the process then ends with its answer, here.
    """
    with asyncio.Runner() as runner:
        status = runner.run(main)
        guard = threading.Timer(thread_seconds, _give_up, (status, thread_seconds))
        guard.daemon = True
        guard.start()
    guard.cancel()
    return status


def _give_up(status: int, seconds: float) -> None:
    text = f"ends without its threads: waited {seconds:g} s for files that they write or remove"
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)
