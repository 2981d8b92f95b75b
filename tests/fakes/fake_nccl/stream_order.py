"""A device's order of memory accesses, simulated on the CPU: the reading half of the NCCL fake.

Memory that an unfinished operation writes holds junk. Each access must have been ordered after the
operation (by a wait of the same thread), and then blocks until the result is there. Accesses are:

* a torch operation of a thread that watches (:func:`enter_stream_order`), which stands for a kernel
  and for what synchronises the host by copying a value out (``item()``, ``bool()``);
* the host synchronisation points that a CPU tensor passes without any operation, so that no
  dispatch sees them: ``cpu()``, ``numpy()`` (with ``__array__``), ``tolist()``. A device tensor is
  copied to the host there, and the host waits for the current stream;
* the thread that copies during training. On a device that is a side stream, which waits for the
  stream of the thread that submitted the copy: so the copier is ordered after exactly what the
  submitting thread was ordered after, and waits by itself, not the submitter;
* ``synchronize`` of the platform: all launched operations are over then; ``catch_up``: those after
  which the calling thread is ordered.

A device in error (:attr:`Order.error`) raises at each of these, and does not recover.

An operation of an aborted communicator is over as well, and leaves its junk. Reading that raises
nothing, as on a device; it is noted in the file named by ``DEADPOOL_FAKE_NCCL_JUNK``, if any, so
that a test knows that junk was really read, and where.
"""

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from deadpool_megatron.comms.in_flight.works import tensors_in
from deadpool_megatron.platform.devices import CopyFailedError
from fake_nccl.collected import collected

#: each line of the file is a JSON object: operation, pid, and the functions that were reading
JUNK_LOG = "DEADPOOL_FAKE_NCCL_JUNK"
_HOST_SYNCHRONISATION = ("cpu", "numpy", "tolist")
#: number of newer outputs after which an untouched output is released
_PENDING_LIMIT = 4096
_FRAMES = 24
_SYNCHRONISED_SECONDS = 5.0


class StreamOrderError(AssertionError):
    """Memory of an unfinished operation was touched by a thread that did not wait for it."""


@contextmanager
def unwatched() -> Iterator[None]:
    """No dispatch of ours and no gradients: the device itself works on tensors."""
    with _disable_current_modes(), torch.no_grad():
        yield


class Operation(Protocol):
    """The state of an operation in the order."""

    name: str
    outputs: list[torch.Tensor]
    ordered: set[int]

    def block(self, limit_seconds: float | None = None) -> bool:
        """Hold the host until it is over; answers False if it was aborted and left junk.

        Raises TimeoutError after ``limit_seconds``.
        """

    def is_over(self) -> bool:
        """Whether :meth:`block` returns at once."""


class Order:
    """Which memory belongs to unfinished operations. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[tuple[int, int, Operation]] = []
        #: of the device, and for ever: a kernel that ran on junk has asserted
        self.error = ""

    def __bool__(self) -> bool:
        return bool(self._pending or self.error)

    def add(self, operation: Operation) -> None:
        """From now on the memory of its outputs is watched."""
        extents = [(*_extent(output), operation) for output in operation.outputs if output.numel()]
        with self._lock:
            self._pending += extents
            old = self._pending[:-_PENDING_LIMIT]
        for _, _, other in old:
            if other.is_over():
                other.block()
                self._drop(other)

    def settle(self, value: Any, strict: bool = True) -> None:
        """Wait for the operations that write into memory of the tensors in ``value``.

        Raises StreamOrderError if ``strict`` and the calling thread is not ordered after them.
        """
        if not self:
            return
        self._raise_error()
        with unwatched():
            for tensor in tensors_in(value):
                self._settle(tensor, strict)

    def settle_all(self, deadline_seconds: float) -> None:
        """Wait for everything. Raises TimeoutError."""
        self._raise_error()
        until = time.monotonic() + deadline_seconds
        for operation in self._operations():
            operation.block(until - time.monotonic())
            self._drop(operation)

    def after_current_thread(self) -> list[Operation]:
        """The operations that the calling thread is ordered after."""
        return [operation for operation in self._operations() if get_ident() in operation.ordered]

    def catch_up(self, timeout_seconds: float) -> bool:
        """Wait for the operations that the calling thread is ordered after; False: not in time."""
        if self.error:
            raise CopyFailedError(self.error)
        until = time.monotonic() + timeout_seconds
        for operation in self.after_current_thread():
            try:
                operation.block(until - time.monotonic())
            except TimeoutError:
                return False
            self._drop(operation)
        return True

    def forget(self, operation: Operation) -> None:
        """Order further accesses of its outputs after it."""
        self._drop(operation)

    def _raise_error(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def _settle(self, tensor: torch.Tensor, strict: bool) -> None:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return
        start, end = _extent(tensor)
        with self._lock:
            pending = list(self._pending)
        touched = [operation for low, high, operation in pending if low < end and start < high]
        for operation in touched:
            if strict and get_ident() not in operation.ordered:
                raise StreamOrderError(f"{operation.name}: its output was used without a wait")
        for operation in touched:
            if not operation.block():
                _note_junk(operation)
            self._drop(operation)

    def _operations(self) -> list[Operation]:
        with self._lock:
            return list({id(entry[2]): entry[2] for entry in self._pending}.values())

    def _drop(self, operation: Operation) -> None:
        with self._lock:
            self._pending = [entry for entry in self._pending if entry[2] is not operation]


order = Order()


class StreamOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every torch operation of the thread that entered it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if order and not func.is_view:
            order.settle([args, kwargs or {}])
        return func(*args, **(kwargs or {}))


_modes: dict[int, Any] = {}


def enter_stream_order() -> None:
    """Watch the calling thread from now on, and host synchronisation and copies of all threads.

    Called by the main thread when an epoch is attached. Operations of an older epoch are over by
    then: a drain also synchronises the device, and a fake that waited for ever would hide it.
    """
    collected.assert_none_open()
    order.settle_all(_SYNCHRONISED_SECONDS)
    if get_ident() not in _modes:
        mode: Any = StreamOrder()  # type: ignore[no-untyped-call]
        mode.__enter__()
        if not _modes:
            _watch_host()
            _watch_platform()
        _modes[get_ident()] = mode


def _watch_host() -> None:
    for name in _HOST_SYNCHRONISATION:
        setattr(torch.Tensor, name, _settling(getattr(torch.Tensor, name)))


def _settling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        order.settle(self)
        return original(self, *args, **kwargs)

    return method


def _watch_platform() -> None:
    from deadpool_megatron.platform import devices as cpu

    platform: Any = cpu.CpuPlatform
    submit, synchronize = platform._submit, platform.synchronize

    def submit_to_side_stream(self: Any, copy: Any) -> Any:
        copy.run = functools.partial(_run_beside, copy.run, order.after_current_thread())
        return submit(self, copy)

    def synchronize_device(self: Any, deadline_seconds: float) -> None:
        order.settle_all(deadline_seconds)
        synchronize(self, deadline_seconds)

    platform._submit = submit_to_side_stream
    platform.synchronize = synchronize_device
    platform.catch_up = lambda self, timeout_seconds: order.catch_up(timeout_seconds)


def _run_beside(run: Callable[[], None], before: list[Operation]) -> None:
    """Run a copy in the calling thread as on a stream that waits for the operations ``before``."""
    for operation in before:
        operation.ordered.add(get_ident())
    with StreamOrder():  # type: ignore[no-untyped-call]
        run()


def _note_junk(operation: Operation) -> None:
    path = os.environ.get(JUNK_LOG, "")
    if not path:
        return
    facts = {"operation": operation.name, "pid": os.getpid(), "readers": list(_callers())}
    line = (json.dumps(facts) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def _callers() -> Iterator[str]:
    """Names of the functions that are reading, the innermost first."""
    frame: Any = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield frame.f_code.co_name
        frame = frame.f_back


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last byte address that the tensor's elements span."""
    start = tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
