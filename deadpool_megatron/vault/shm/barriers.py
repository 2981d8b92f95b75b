"""Memory barriers between the processes of a node; shm/segment.py says where they are needed."""

from __future__ import annotations

import ctypes
import platform
import time


def fence() -> None:
    """Make every running thread of the host pass a full memory barrier; about 10 ms.

    Where the system call is missing, a pause far longer than any store buffer takes to drain.
    """
    number = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
    global_barrier = 1
    if number is None or ctypes.CDLL(None).syscall(number, global_barrier, 0, 0) != 0:
        time.sleep(0.01)


def settle() -> None:
    """Before reading bytes that a live member has just declared FILLED.

    x86 shows the stores of one processor in their order. Elsewhere the state word of a slot could
    be seen before the bytes, when it is seen before the member's message about it has arrived.
    """
    if platform.machine() != "x86_64":
        fence()
