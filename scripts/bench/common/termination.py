"""The end of a bench by a signal, which ends its runs too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Have SIGTERM end this process as an exception does, through every ``finally``: otherwise its
    runs, which have sessions of their own, would continue without it. Main thread only.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    # A second signal, as from timeout(1), would interrupt the cleanup that the first has begun.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def stop(leader: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process group by its leader, with SIGTERM and time to clean up before SIGKILL."""
    if leader.poll() is not None:
        return
    os.killpg(leader.pid, signal.SIGTERM)
    try:
        leader.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
