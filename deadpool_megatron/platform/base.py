"""The device, as the rest of the package needs it: waiting, pinning, copying beside training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch


class CopyFailedError(RuntimeError):
    """A copy beside training ended with an error; its destination holds undefined bytes."""


class CopyHandle(ABC):
    """One running group of copies; the sources must not change until :meth:`done` answers true."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether all bytes have arrived. Never blocks; raises CopyFailedError."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> bool:
        """Wait for at most this long; answers :meth:`done`. Raises CopyFailedError."""

    def precede(self, timeout_seconds: float) -> bool:
        """Have work that the calling thread submits from now on begin after this copy.

        True at once where the device does the waiting; elsewhere as :meth:`wait`.
        """
        return self.wait(timeout_seconds)


class Platform(ABC):
    """The device under the training process."""

    name: str
    is_cuda: bool

    @abstractmethod
    def install(self) -> None:
        """Make Megatron importable here; must run before its first import. Idempotent."""

    @abstractmethod
    def synchronize(self, deadline_seconds: float) -> None:
        """Wait until the device has finished all work given to it so far.

        Raises TimeoutError naming what did not finish, and RuntimeError for a device in error.
        """

    @abstractmethod
    def catch_up(self, timeout_seconds: float) -> bool:
        """Wait for at most this long until the device has done what the calling thread has given it
        so far. Returns whether it has; raises CopyFailedError for a device in error."""

    def thread_entry(self) -> Callable[[], None]:
        """Return what a thread calls first that is made here and asks the device for anything, be
        it only whether a copy has ended: its device is then that of the calling thread."""
        return _nothing

    @abstractmethod
    def register_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        """Page-lock writable host memory so that :meth:`side_copy` into it is asynchronous.

        Takes seconds per 10 GB: call it at start, never while recovering. Raises RuntimeError when
        the driver refuses, ValueError for memory that is read-only or scattered.
        """

    @abstractmethod
    def unregister_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        """Undo :meth:`register_host_memory` for exactly the same memory."""

    @abstractmethod
    def side_copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> CopyHandle:
        """Start ``dst[i].copy_(src[i])`` for all i beside the work of the calling thread.

        Reads the sources as they are after all work submitted so far. Shapes must agree pairwise;
        raises ValueError when they do not. The lists may be reused by the caller, the tensors not.
        """


def _nothing() -> None:
    """Do nothing, where the device is the same for all threads."""


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
    dst: list[torch.Tensor], src: list[torch.Tensor], most_bytes: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same copies in pieces of at most ``most_bytes`` each, as views, in order.

    A pair that is not contiguous on both sides stays whole.
    """
    into: list[torch.Tensor] = []
    out_of: list[torch.Tensor] = []
    for target, source in zip(dst, src, strict=True):
        size = source.element_size()
        if source.numel() * size > most_bytes and target.is_contiguous() and source.is_contiguous():
            count = max(1, most_bytes // size)
            into += torch.split(target.view(-1), count)
            out_of += torch.split(source.view(-1), count)
        else:
            into.append(target)
            out_of.append(source)
    return into, out_of


def host_range(memory: torch.Tensor | memoryview) -> tuple[int, int]:
    """Address and length in bytes of contiguous, writable host memory; ValueError otherwise."""
    if isinstance(memory, memoryview):
        if memory.readonly or not memory.c_contiguous:
            raise ValueError("host memory must be writable and contiguous")
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        tensor = memory
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("host memory must be a contiguous tensor on the CPU")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
