"""Names of processes and threads for ``ps``, ``top -H`` and ``perf``, and the command that starts
this interpreter again."""

from __future__ import annotations

import ctypes
import sys
import threading

_PR_SET_NAME = 15
_MAX_BYTES = 15
_libc = ctypes.CDLL(None)


def interpreter(*arguments: str) -> list[str]:
    """Return the command that starts this interpreter again with ``arguments``.

    The working directory is not in the import path (``-P``), as a file there, of the user or of
    others, could replace a library of the same name.
    """
    return [sys.executable, "-P", *arguments]


def set_process_name(name: str) -> None:
    """Name the calling thread. The name of the main thread is that of the process. Only the first
    15 bytes count."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:_MAX_BYTES], 0, 0, 0)


def show_thread_names() -> None:
    """Let threads that start later have their Python name in the kernel, as with Python 3.14. For
    processes without a profiler.
    """

    def at_start(*_: object) -> None:
        sys.setprofile(None)
        set_process_name(threading.current_thread().name)

    threading.setprofile(at_start)
