"""The thread that frees epochs after their end."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

from deadpool_megatron.comms.in_flight.epoch import RetiredEpoch


def trim_heap() -> None:
    """Give freed memory back to the kernel: glibc keeps freed message buffers otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Reaper:
    """A thread that frees old epochs, where blocking does no harm. It starts with the first epoch.

    Destroying a gloo group joins its worker thread, which may be stuck until the gloo timeout;
    torch releases the interpreter lock meanwhile. The resources of an epoch are bounded by that
    timeout. ``pending`` counts epochs that are not freed yet.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[RetiredEpoch] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.pending = 0

    def take(self, retired: RetiredEpoch) -> None:
        """Free ``retired`` soon; the caller must keep no reference into it."""
        with self._lock:
            self.pending += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="deadpool-reaper", daemon=True
                )
                self._thread.start()
        self._inbox.put(retired)

    def _serve(self) -> None:
        while True:
            retired = self._inbox.get()
            _free(retired)
            trim_heap()
            with self._lock:
                self.pending -= 1


def _free(retired: RetiredEpoch) -> None:
    # Late connections of an interrupted attach would keep a blocked constructor alive for long.
    for fabric in retired.fabrics:
        _try(fabric.abort)
    retired.works.clear()
    while retired.groups:
        _try(retired.groups.pop().close)
    while retired.fabrics:
        _try(retired.fabrics.pop().close)


def _try(step: Callable[[], object]) -> None:
    """Take a step. Its failure, for example for lack of descriptors, must not stop later steps."""
    try:
        step()
    except Exception as error:
        text = f"deadpool: a part of an old epoch was not freed: {error!r}"
        print(text, file=sys.stderr, flush=True)
