"""Frees old epochs where blocking does no harm.

Destroying a gloo group joins its worker thread, which may be stuck until the gloo timeout; torch
releases the interpreter lock meanwhile. What an epoch holds is thus bounded by that timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

from deadpool_megatron.comms.in_flight.epoch import Leftovers


def trim_heap() -> None:
    """Give freed memory back to the kernel: glibc keeps freed message buffers otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Reaper:
    """One thread, started with the first bundle. ``pending`` counts bundles not yet freed."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Leftovers] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.pending = 0

    def take(self, leftovers: Leftovers) -> None:
        """Free ``leftovers`` soon; the caller must keep no reference into them."""
        with self._lock:
            self.pending += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="deadpool-reaper", daemon=True
                )
                self._thread.start()
        self._inbox.put(leftovers)

    def _serve(self) -> None:
        while True:
            leftovers = self._inbox.get()
            _free(leftovers)
            trim_heap()
            with self._lock:
                self.pending -= 1


def _free(leftovers: Leftovers) -> None:
    # Late connections of an interrupted attach would keep a blocked constructor alive for long.
    for fabric in leftovers.fabrics:
        _try(fabric.abort)
    leftovers.works.clear()
    while leftovers.groups:
        _try(leftovers.groups.pop().close)
    while leftovers.fabrics:
        _try(leftovers.fabrics.pop().close)


def _try(step: Callable[[], object]) -> None:
    """A moment without descriptors or threads must not keep what else there is to free."""
    try:
        step()
    except Exception as error:
        print(
            f"deadpool: a part of an old epoch was not freed: {error!r}",
            file=sys.stderr,
            flush=True,
        )
