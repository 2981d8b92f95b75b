"""Threads inside of NCCL, whose communicators must not be aborted meanwhile.

An abort frees a communicator, whoever is in it. So whoever closes an epoch says so first, then
waits until no thread is inside, then aborts; a thread says that it is inside first, and then looks
whether the epoch is closed. In CPython one of the two sees the other, without a lock.

From start to end of a coalescing block nothing may raise, either.

NCCL counts the open blocks of each thread (group.cc, ncclGroupDepth). One that is left half way, as
torch leaves one by an exception (``ProcessGroupNCCL::send``), stays open for ever: whatever the
thread calls from then on is collected and never run, without an error, in every epoch to come, and
its outputs are what lay in memory before. The end of a block goes through the communicators that
were used in it, so none of them may be freed by an abort before that.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from threading import get_ident

#: a thread inside only enqueues: microseconds, unless it hangs in the driver
LONGEST_SECONDS = 0.2
_LOOK_SECONDS = 0.001
_INVALID_USAGE = 5  # ncclInvalidUsage of nccl.h: no group is open on this thread


class Blocks:
    """The open blocks of all threads on the communicators of one epoch."""

    def __init__(self, is_left_open: Callable[[], bool]) -> None:
        """``is_left_open()``: whether the calling thread is in a group of NCCL that no block of
        ours has opened."""
        self._is_left_open = is_left_open
        self._known: set[int] = set()
        self._lost = ""
        self._depths: dict[int, int] = {}
        self._problems: dict[int, RuntimeError] = {}
        self._closed = False
        #: an abort could not wait for a thread any longer: it may be in what is freed, and collect
        #: for ever
        self.cut = False

    def lose(self, operation: str) -> None:
        """An exception of NCCL has left ``operation``: the group that it had opened stays open."""
        self._lost = self._lost or f"{operation} failed in a group of NCCL, and left it open"

    def begin(self, operation: str) -> str:
        """Have NCCL asked before the first operation of a thread. Returns why the process must be
        replaced; empty when it need not be."""
        if get_ident() not in self._known:
            self._known.add(get_ident())
            self.ruin()
        return self._lost

    def ruin(self) -> str:
        """Return why a thread of this process launches nothing any more, the calling one by NCCL's
        own word; empty while all do."""
        if self.cut:
            return "a thread was stuck in an operation of NCCL, or in a block of them"
        if not self.is_open_here() and self._is_left_open():
            self.lose("something unknown")
        return self._lost

    def enter(self) -> bool:
        """Open a block on the calling thread; False once the blocks are closed: nothing is open."""
        ident = get_ident()
        depth = self._depths.get(ident, 0)
        self._depths[ident] = depth + 1
        if self._closed and not depth:
            del self._depths[ident]
            return False
        return True

    def is_open_here(self) -> bool:
        """Return whether the calling thread is in a block, so that nothing may raise."""
        return get_ident() in self._depths

    def keep(self, problem: RuntimeError) -> None:
        """Keep an error of an operation in the block until the end; the first one counts."""
        self._problems.setdefault(get_ident(), problem)

    def leave(self) -> RuntimeError | None:
        """The innermost block of the calling thread has ended. Returns what was kept, if it was
        the outermost as well."""
        ident = get_ident()
        depth = self._depths.get(ident, 1) - 1
        if depth:
            self._depths[ident] = depth
            return None
        problem = self._problems.pop(ident, None)
        self._depths.pop(ident, None)
        return problem

    def close(self, seconds: float, is_inside: Callable[[], bool]) -> None:
        """Let no block begin, and wait until none is open and ``is_inside()`` no thread; after
        ``seconds`` they are cut."""
        self._closed = True
        until = time.monotonic() + seconds
        while not self.cut and (self._depths or is_inside()):
            self.cut = time.monotonic() >= until
            time.sleep(_LOOK_SECONDS)


@functools.cache
def _group_end() -> Callable[[], int] | None:
    """``ncclGroupEnd`` of the library that torch has loaded; None where it is part of torch's."""
    try:
        function: Callable[[], int] = ctypes.CDLL("libnccl.so.2").ncclGroupEnd
    except (OSError, AttributeError):
        return None
    return function


def is_left_open() -> bool:
    """Ask NCCL whether the calling thread, in no group that it knows of, is in one. Needs no
    device.
    """
    end = _group_end()
    return end is not None and end() != _INVALID_USAGE
