"""Training on NVIDIA GPUs: copies on a side stream, host memory page-locked by the driver."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from deadpool_megatron.platform import devices

# A copy engine finishes a copy before it starts the next. So training's own reads from the device
# (the loss, a norm) wait at most for a piece, 0.6 ms over PCIe 5, and not for the whole shard; the
# idea is that of REFT's tiny buckets.
_PIECE_BYTES = 32 << 20
# Events are polled, as a wait in the driver (event.synchronize()) has no deadline.
_MIN_POLL_SECONDS = 50e-6
_MAX_POLL_SECONDS = 2e-3
# The copies' stream does not wait for the default stream; training's kernels go first.
_NON_BLOCKING = 1
_LOWEST_PRIORITY = 0


class _EventCopy(devices.CopyHandle):
    """Copies enqueued on the side stream, followed by an event."""

    def __init__(self, event: torch.cuda.Event, tensors: list[torch.Tensor]) -> None:
        self._event = event
        # The caching allocator must not reuse sources or destinations before the copies end.
        self._tensors = tensors

    def done(self) -> bool:
        try:
            is_done = bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise devices.CopyFailedError(f"copy on the side stream failed: {error}") from error
        if is_done:
            self._tensors = []
        return is_done

    def wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        pause = _MIN_POLL_SECONDS
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        return True


class _DeviceWait(threading.Thread):
    """A wait for all streams of a device, also those of other libraries. The driver's wait has no
    deadline; a process that gives up waiting must be replaced."""

    def __init__(self, device: int) -> None:
        super().__init__(name="deadpool-device-wait", daemon=True)
        self.device = device
        self.error: RuntimeError | None = None

    def run(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self.error = error


class CudaPlatform(devices.Platform):
    """The current CUDA device."""

    is_cuda = True

    def __init__(self) -> None:
        self._side_stream: torch.cuda.Stream | None = None
        self._catch_up_event: torch.cuda.Event | None = None

    def thread_entry(self) -> Callable[[], None]:
        # By default a new thread uses the first device of the node, where each process would then
        # create a context.
        return functools.partial(torch.cuda.set_device, torch.cuda.current_device())

    def synchronize(self, deadline_seconds: float) -> None:
        wait = _DeviceWait(torch.cuda.current_device())
        wait.start()
        wait.join(deadline_seconds)
        if wait.is_alive():
            raise TimeoutError(
                f"CUDA device {wait.device} still busy after {deadline_seconds:.1f} s"
            )
        if wait.error is not None:
            raise wait.error

    def catch_up(self, timeout_seconds: float) -> bool:
        if self._catch_up_event is None:
            self._catch_up_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._catch_up_event.record(torch.cuda.current_stream())
        return _EventCopy(self._catch_up_event, []).wait(timeout_seconds)

    def register_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        address, length = devices.host_range(memory)
        if code := int(_driver().cudaHostRegister(address, length, 0)):
            # The runtime reports the error of a refused call at the next kernel, which is this.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
            torch.cuda.check_error(code)

    def unregister_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        address, _ = devices.host_range(memory)
        torch.cuda.check_error(int(_driver().cudaHostUnregister(address)))

    def side_copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> devices.CopyHandle:
        devices.check_pairs(dst, src)
        stream = self._stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            if src:
                torch._foreach_copy_(*devices.in_pieces(dst, src, _PIECE_BYTES), non_blocking=True)
            event = stream.record_event()
        return _EventCopy(event, [*dst, *src])

    def _stream(self) -> torch.cuda.Stream:
        if self._side_stream is None:
            self._side_stream = _own_stream(torch.cuda.current_device())
        return self._side_stream


def _own_stream(device: int) -> torch.cuda.Stream:
    """Return a new stream that nothing else in the process uses.

    torch hands out 32 streams for each priority in turn, to groups and to users, so after a few
    recoveries the operations of a new group would share a stream with the copies and wait for them.
    If the driver cannot create a stream, return a stream of torch, with a warning.
    """
    handle = ctypes.c_void_p()
    try:
        create = _driver_library().cuStreamCreateWithPriority
        code = int(create(ctypes.byref(handle), _NON_BLOCKING, _LOWEST_PRIORITY))
        problem = f"error {code} of the driver" if code else ""
    except (OSError, AttributeError) as error:
        problem = str(error)
    if problem:
        text = f"copies share a stream with what torch gives the same one ({problem}): a little"
        print(f"{text} slower after recoveries", file=sys.stderr, flush=True)
        return torch.cuda.Stream(priority=_LOWEST_PRIORITY)  # type: ignore[no-untyped-call]
    return torch.cuda.ExternalStream(handle.value, device=device)  # type: ignore[no-untyped-call]


def _driver_library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
