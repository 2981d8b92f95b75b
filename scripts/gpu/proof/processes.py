"""The end of a part's processes, also of those that left its session or lost their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_REAP_SECONDS = 3.0


class TimeIsUp(BaseException):
    """SIGTERM or SIGINT came; no fault of the part."""


def end_in_order() -> None:
    """Have the first SIGTERM or SIGINT raise :class:`TimeIsUp`."""

    def stop(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise TimeIsUp

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def end_with_parent() -> None:
    """Have this process get SIGTERM when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill all children, and their children as this process inherits them."""
    until = time.monotonic() + _REAP_SECONDS
    while (children := _children()) and time.monotonic() < until:
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(parent) == os.getpid():
                found.append(int(path.parent.name))
    return found
