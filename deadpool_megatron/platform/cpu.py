"""Training on a machine without a GPU: one copier thread, nothing to pin, Megatron on stand-ins."""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import dataclass, field

import torch

from deadpool_megatron.platform import stand_ins
from deadpool_megatron.platform.base import (
    CopyFailedError,
    CopyHandle,
    Platform,
    check_pairs,
    host_range,
)

# One call of torch copies at most about this much, so that an interrupt is never behind a long one.
CHUNK_BYTES = 4 << 20


@dataclass
class _ThreadCopy(CopyHandle):
    """A group of copies queued for the copier thread."""

    dst: list[torch.Tensor]
    src: list[torch.Tensor]
    finished: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def done(self) -> bool:
        return self._result() if self.finished.is_set() else False

    def wait(self, timeout_seconds: float) -> bool:
        return self._result() if self.finished.wait(timeout_seconds) else False

    def _result(self) -> bool:
        if self.error is not None:
            raise CopyFailedError(f"copy on the CPU failed: {self.error}") from self.error
        return True

    def run(self) -> None:
        """Copy everything, in the calling thread; keeps the error instead of raising it."""
        try:
            # Gradient mode belongs to the thread; fp32 sources may be leaf views that require it.
            with torch.no_grad():
                for start, end in _chunks(self.src):
                    torch._foreach_copy_(self.dst[start:end], self.src[start:end])
        except Exception as error:
            self.error = error
        # The tensors must not outlive the copy through a handle that somebody keeps.
        self.dst, self.src = [], []
        self.finished.set()


class _Copier:
    """The thread that copies. Started by the first copy; a forked child starts its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_ThreadCopy] = queue.SimpleQueue()
        self._owner_pid = -1

    def submit(self, copy: _ThreadCopy) -> None:
        if self._owner_pid != os.getpid():
            self._queue = queue.SimpleQueue()
            self._owner_pid = os.getpid()
            threading.Thread(
                target=_serve, args=(self._queue,), name="deadpool-copier", daemon=True
            ).start()
        self._queue.put(copy)


def _serve(copies: queue.SimpleQueue[_ThreadCopy]) -> None:
    while True:
        copies.get().run()


class CpuPlatform(Platform):
    """The CPU, with Megatron's CUDA calls answered by :mod:`.standins`."""

    name = "cpu"
    is_cuda = False

    def __init__(self) -> None:
        self._copier = _Copier()

    def install(self) -> None:
        stand_ins.install()

    def synchronize(self, deadline_seconds: float) -> None:
        # Work on the CPU is finished when its call returns; only the copier runs beside it.
        marker = _ThreadCopy([], [])
        started = time.monotonic()
        self._copier.submit(marker)
        if not marker.wait(deadline_seconds):
            waited = time.monotonic() - started
            raise TimeoutError(f"copier thread still busy after {waited:.1f} s")

    def catch_up(self, timeout_seconds: float) -> bool:
        return True

    def register_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        host_range(memory)

    def unregister_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        host_range(memory)

    def side_copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> CopyHandle:
        check_pairs(dst, src)
        copy = _ThreadCopy(list(dst), list(src))
        self._copier.submit(copy)
        return copy


def _chunks(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Index ranges [start, end) whose tensors together hold about CHUNK_BYTES, in order."""
    ranges: list[tuple[int, int]] = []
    start = held = 0
    for index, tensor in enumerate(tensors):
        held += tensor.numel() * tensor.element_size()
        if held >= CHUNK_BYTES:
            ranges.append((start, index + 1))
            start, held = index + 1, 0
    if start < len(tensors):
        ranges.append((start, len(tensors)))
    return ranges
