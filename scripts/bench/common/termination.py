"""The end of a bench by a signal, which ends its runs too.

Nothing of the package is imported here: scripts/mutate.py must not have it before its forks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

#: the variable that marks the processes of a run
MARK = "DEADPOOL_BENCH"


def marked_processes(mark: str, variable: str = MARK) -> Iterator[int]:
    """Yield the processes, descendants too, with ``variable=mark`` in their environment."""
    entry = f"{variable}={mark}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or of another user
            if entry in (directory / "environ").read_bytes().split(b"\0"):
                yield int(directory.name)


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
