"""The interface of a device: waiting, page-locking of memory, copies during training. And the CPU
as a device, with a thread that copies, nothing to page-lock, and stand-ins for CUDA.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

# A call of torch copies about this many bytes at most, so that an interrupt never waits long.
CHUNK_BYTES = 4 << 20


class CopyFailedError(RuntimeError):
    """A copy during training failed; its destination holds undefined bytes."""


class CopyHandle(ABC):
    """A running group of copies; the sources must not change until :meth:`done` is true."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether all bytes have arrived. Never blocks; raises CopyFailedError."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the copies are done, for at most the timeout; return :meth:`done`. Raises
        CopyFailedError."""


class Platform(ABC):
    """The device under the training process."""

    is_cuda: bool

    @abstractmethod
    def synchronize(self, deadline_seconds: float) -> None:
        """Wait until the device has finished all work given to it so far.

        Raises TimeoutError with the name of the busy device or thread, and RuntimeError for a
        device in error.
        """

    @abstractmethod
    def catch_up(self, timeout_seconds: float) -> bool:
        """Wait until the device has finished the present work of the calling thread, for at most
        the timeout. Return whether it has finished. Raises CopyFailedError for a device in
        error."""

    def thread_entry(self) -> Callable[[], None]:
        """Return a function that gives a new thread the device of the calling thread. A thread that
        uses the device, even only to poll a copy, must call the function first."""
        return lambda: None  # on the CPU all threads have the same device

    def register_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        """Page-lock writable host memory, so that :meth:`side_copy` into it is asynchronous.

        This takes seconds per 10 GB, so never call it during a recovery. Raises RuntimeError if the
        driver refuses, ValueError for memory that is read-only or not contiguous.
        """
        host_range(memory)

    def unregister_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        """Undo :meth:`register_host_memory` for exactly the same memory."""
        host_range(memory)

    @abstractmethod
    def side_copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> CopyHandle:
        """Start ``dst[i].copy_(src[i])`` for all i, concurrently with the calling thread's work.

        The sources are read after all work submitted so far. Raises ValueError unless the shapes
        agree in pairs. The caller may change the lists at once, the tensors when the copy is done.
        """


def check_pairs(dst: list[torch.Tensor], src: list[torch.Tensor]) -> None:
    """Raise ValueError unless destinations and sources agree in number and shape."""
    if len(dst) != len(src):
        raise ValueError(f"side copy of {len(src)} tensors into {len(dst)}")
    for index, (into, source) in enumerate(zip(dst, src, strict=True)):
        if into.shape != source.shape:
            raise ValueError(
                f"side copy, tensor {index}: {tuple(source.shape)} into {tuple(into.shape)}"
            )


def in_pieces(
    dst: list[torch.Tensor], src: list[torch.Tensor], max_bytes: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return destinations and sources cut into pieces of at most ``max_bytes``, as views, in order.

    A pair stays whole unless both its tensors are contiguous. A piece has at least one element.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for target, source in zip(dst, src, strict=True):
        size = source.element_size()
        if source.numel() * size > max_bytes and target.is_contiguous() and source.is_contiguous():
            count = max(1, max_bytes // size)
            targets += torch.split(target.view(-1), count)
            sources += torch.split(source.view(-1), count)
        else:
            targets.append(target)
            sources.append(source)
    return targets, sources


def host_range(memory: torch.Tensor | memoryview) -> tuple[int, int]:
    """Return address and length in bytes of contiguous, writable host memory, or raise
    ValueError."""
    if isinstance(memory, memoryview):
        if memory.readonly or not memory.c_contiguous:
            raise ValueError("host memory must be writable and contiguous")
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        tensor = memory
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("host memory must be a contiguous tensor on the CPU")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


class PinnedSlots:
    """The memory of a process's slots that is registered with the driver.

    A process that waits for a role registers its parked slots. Other slots are registered when they
    are first written, in the first iterations of a role, which are slow in any case. On the CPU
    nothing is registered. A refusal of the driver (a limit on locked memory, pages that two parts
    share) only costs speed. For the main thread only.
    """

    def __init__(self, platform: Platform, warn: Callable[[str], None]) -> None:
        """``warn`` gets a line when the driver first refuses."""
        self._platform = platform
        self._warn = warn
        self._is_refused = False
        # By address. A view keeps its mapping, so no other memory can get the address.
        self._views: dict[int, memoryview] = {}

    def pin(self, views: Iterable[memoryview]) -> None:
        """Register memory of slots that is not registered yet. After a refusal do nothing."""
        if not self._platform.is_cuda or self._is_refused:
            return
        for view in views:
            address, _ = host_range(view)
            if address in self._views:
                continue
            try:
                self._platform.register_host_memory(view)
            except RuntimeError as error:
                self._is_refused = True
                reason = str(error).partition("\n")[0]
                self._warn(
                    f"the driver does not lock {len(view)} bytes of a slot ({reason}): copies from"
                    " the device wait for the host; raise the limit on locked memory (ulimit -l)"
                )
                return
            self._views[address] = view

    def keep_only(self, views: Iterable[memoryview]) -> None:
        """Unregister all memory except ``views``, as that of slots that this process has lost."""
        if not self._views:
            return
        addresses = {host_range(view)[0] for view in views}
        for address in self._views.keys() - addresses:
            self._release(self._views.pop(address))

    def release(self) -> None:
        """Unregister everything, before the slots are unmapped."""
        while self._views:
            self._release(self._views.popitem()[1])

    def _release(self, view: memoryview) -> None:
        # A device in error refuses the call; its process is about to end.
        with contextlib.suppress(RuntimeError):
            self._platform.unregister_host_memory(view)


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
        """Make all copies in the calling thread; keep an error instead of raising it."""
        try:
            # Gradient mode belongs to the thread; fp32 sources may be leaf views that require it.
            with torch.no_grad():
                for start, end in _chunks(self.src):
                    torch._foreach_copy_(self.dst[start:end], self.src[start:end])
        except Exception as error:
            self.error = error
        # A caller may keep the handle; it must not keep the tensors alive.
        self.dst, self.src = [], []
        self.finished.set()


def _serve(copies: queue.SimpleQueue[_ThreadCopy]) -> None:
    while True:
        copies.get().run()


class CpuPlatform(Platform):
    """The CPU. :mod:`deadpool_megatron.megatron.stand_ins` answers Megatron's CUDA calls there."""

    is_cuda = False

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_ThreadCopy] = queue.SimpleQueue()
        self._owner_pid = -1

    def synchronize(self, deadline_seconds: float) -> None:
        # Work on the CPU is finished when its call returns, except that of the copier thread.
        started = time.monotonic()
        marker = self._submit(_ThreadCopy([], []))
        if not marker.wait(deadline_seconds):
            waited = time.monotonic() - started
            raise TimeoutError(f"copier thread still busy after {waited:.1f} s")

    def catch_up(self, timeout_seconds: float) -> bool:
        return True

    def side_copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> CopyHandle:
        check_pairs(dst, src)
        return self._submit(_ThreadCopy(list(dst), list(src)))

    def _submit(self, copy: _ThreadCopy) -> _ThreadCopy:
        """Give a copy to the copier thread, which is started at the first copy of a process, also
        of a forked process."""
        if self._owner_pid != os.getpid():
            self._queue = queue.SimpleQueue()
            self._owner_pid = os.getpid()
            threading.Thread(
                target=_serve, args=(self._queue,), name="deadpool-copier", daemon=True
            ).start()
        self._queue.put(copy)
        return copy


def _chunks(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return index ranges [start, end), in order. The tensors of each range have CHUNK_BYTES or
    somewhat more together; those of the last may have less."""
    ranges: list[tuple[int, int]] = []
    start = nbytes = 0
    for index, tensor in enumerate(tensors):
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= CHUNK_BYTES:
            ranges.append((start, index + 1))
            start, nbytes = index + 1, 0
    if start < len(tensors):
        ranges.append((start, len(tensors)))
    return ranges
