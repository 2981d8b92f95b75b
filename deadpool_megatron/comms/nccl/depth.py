"""How deep a thread is in groups of NCCL, asked of NCCL itself.

NCCL counts the open groups of each thread (group.cc, ncclGroupDepth). What opens one inside torch
and leaves it by an exception (``ProcessGroupNCCL::send``) never ends it, and all that the thread
calls from then on is collected and never launched: without an error, in every epoch to come.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_INVALID_USAGE = 5  # ncclInvalidUsage of nccl.h: no group is open on this thread


@functools.cache
def _group_end() -> Callable[[], int] | None:
    """``ncclGroupEnd`` of the library that torch has loaded; None where it is part of torch's."""
    try:
        function: Callable[[], int] = ctypes.CDLL("libnccl.so.2").ncclGroupEnd
    except (OSError, AttributeError):
        return None
    return function


def is_left_open() -> bool:
    """Whether the calling thread, in no group that it knows of, is in one. Needs no device."""
    end = _group_end()
    return end is not None and end() != _INVALID_USAGE
