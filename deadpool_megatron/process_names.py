"""Names of our processes, and how these are started: for ``ps``, ``top -H``, ``perf``."""

from __future__ import annotations

import ctypes
import sys
import threading

_PR_SET_NAME = 15
_MOST_BYTES = 15
_libc = ctypes.CDLL(None)


def interpreter(*arguments: str) -> list[str]:
    """Return the command that starts this interpreter again with ``arguments``.

    Without the working directory in its import path (``-P``): what lies there is the user's, or
    anybody's who may write there, and would be imported in place of a library of the same name.
    """
    return [sys.executable, "-P", *arguments]


def set_process_name(name: str) -> None:
    """Name the calling thread, which is the process when it is the main one (15 bytes)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:_MOST_BYTES], 0, 0, 0)


def show_thread_names() -> None:
    """Have threads that start from now on show the names that they have in Python, as Python 3.14
    does by itself. For processes in which nobody profiles.
    """

    def at_start(*_: object) -> None:
        sys.setprofile(None)
        set_process_name(threading.current_thread().name)

    threading.setprofile(at_start)
