"""A bench that is told to end takes its runs along."""

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
    """Within it SIGTERM ends this process as an exception does, through every ``finally``: else the
    runs that it watches, in sessions of their own, would go on without it. Main thread only.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    # One is enough: a second one, as from timeout(1), would cut short what the first has begun.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def stop(leader: subprocess.Popen[bytes], seconds: float) -> None:
    """End the leader of a process group, if it still runs: so that it can clean up, at first."""
    if leader.poll() is not None:
        return
    os.killpg(leader.pid, signal.SIGTERM)
    try:
        leader.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
