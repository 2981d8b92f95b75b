"""Names of our processes, for ``ps``, ``top -H`` and ``perf``, and their start."""

from __future__ import annotations

import ctypes
import sys
import threading

_PR_SET_NAME = 15
_MAX_BYTES = 15
_libc = ctypes.CDLL(None)


def interpreter(*arguments: str) -> list[str]:
    """Return the command that starts this interpreter again with ``arguments``.

    The working directory is not in its import path (``-P``): a file there, of the user or of
    others, would replace a library of the same name.
    """
    return [sys.executable, "-P", *arguments]


def set_process_name(name: str) -> None:
    """Name the calling thread, which is the process when it is the main one (15 bytes)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:_MAX_BYTES], 0, 0, 0)


def show_thread_names() -> None:
    """Give later threads their Python name in the kernel, as Python 3.14 does. For processes
    without a profiler.
    """

    def at_start(*_: object) -> None:
        sys.setprofile(None)
        set_process_name(threading.current_thread().name)

    threading.setprofile(at_start)
