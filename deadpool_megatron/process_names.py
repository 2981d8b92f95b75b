"""Names by which an operator knows our processes and threads: in ``ps``, ``top -H``, ``perf``."""

from __future__ import annotations

import ctypes
import sys
import threading

_PR_SET_NAME = 15
_MOST_BYTES = 15
_libc = ctypes.CDLL(None)


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
