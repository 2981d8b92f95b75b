"""NCCL's semantics on CPU tensors, on top of gloo, so that tests meet NCCL's traps without a GPU.

Modelled:

* An operation works on the side; its outputs hold junk from launch until it is complete. ``wait()``
  returns at once and only orders the *calling thread* after the operation. The point of
  synchronisation is the next torch operation of that thread on the memory concerned (what a kernel
  or ``.item()`` would be): it blocks until the result is there. A thread that did not wait gets a
  :class:`StreamOrderError`: on a device it would read whatever is there.
* After an abort everything completes, outputs keep their junk, and nothing raises. So does an
  operation whose peer died, but only when aborted: until then it hangs, as kernels do.
* Send and receive outside a coalescing block are an error (:data:`allow_unbatched`), because two
  neighbours that both send first deadlock.
* A communicator that was not connected eagerly is made at its first use through the store, and so
  fails if the store is gone.

For tests only; nothing here is fast. The junk is finite and small, so that no check for NaN saves
the day.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from queue import SimpleQueue
from threading import get_ident
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .epoch import Epoch
from .gloo import GlooFabric
from .inner import GroupSpec
from .nccl import NcclFabric
from .operations import COMMUNICATION, POINT_TO_POINT, SENDS, tensors_in

#: let isend and irecv pass outside a batch, as on communicators bound to a device
allow_unbatched = False

JUNK_BYTE = 0x3C
_POLL_SECONDS = 0.01


class StreamOrderError(AssertionError):
    """Memory of an unfinished operation was touched by a thread that did not wait for it."""


class FakeNcclFabric(NcclFabric):
    """Fake communicators of one epoch, aborted together."""

    def __init__(self, epoch: Epoch, address: str | None = None) -> None:
        super().__init__(epoch)
        self._gloo = GlooFabric(epoch, address)

    def _build(self, spec: GroupSpec, store: Store) -> tuple[Any, Any]:
        communicator = FakeCommunicator(spec, store, self._gloo)
        return communicator, communicator

    def abort(self) -> None:
        super().abort()
        self._gloo.abort()

    def quiescent(self) -> bool:
        return super().quiescent() and self._gloo.quiescent()

    def close(self) -> None:
        super().close()
        self._gloo.close()


class FakeCommunicator:
    """Plays both the plain ProcessGroup and its NCCL Backend."""

    supports_splitting = False
    supports_coalescing = True

    def __init__(self, spec: GroupSpec, store: Store, gloo: GlooFabric) -> None:
        self._spec = spec
        self._store = store
        self._gloo = gloo
        self._group: Any = None
        self._batch: list[FakeWork] | None = None
        self._stream: SimpleQueue[FakeWork | None] | None = None
        self.aborted = False

    # -- as a Backend ----------------------------------------------------------------------------

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._connect()

    def abort(self) -> None:
        self.aborted = True

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """No timeouts here: an operation ends or is aborted."""

    # -- as a ProcessGroup -----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., FakeWork | None]:
        if name not in COMMUNICATION:
            raise AttributeError(name)
        return lambda *args, **kwargs: self._launch(name, args, kwargs)

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _start_coalescing(self, device: torch.device) -> None:
        if self._batch is not None:
            raise RuntimeError("nested coalescing")
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        batch, self._batch = self._batch, None
        return FakeWork(self, "coalesced", [], [], batch or [])

    def _launch(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FakeWork | None:
        if name in POINT_TO_POINT and self._batch is None and not allow_unbatched:
            raise RuntimeError(f"unbatched {name} on {self._spec.description}: NCCL may deadlock")
        if name == "barrier":
            args, kwargs = (), {}
        group = self._connect()
        with _disable_current_modes(), torch.no_grad():
            for tensor in tensors_in(args):
                _order.settle(tensor, strict=False)
            copies: dict[int, torch.Tensor] = {}
            private = _clone(args, copies)
            outputs = [] if name in SENDS or not args else list(tensors_in(args[0]))
            results = [copies[id(output)] for output in outputs]
            work = FakeWork(self, name, outputs, results, [])
            for output in outputs:
                _fill_with_junk(output)
            work.inner = getattr(group, name)(*private, **kwargs)
            _order.add(work)
        self._enqueue(work)
        if self._batch is not None:
            self._batch.append(work)
            return None
        return work

    def _connect(self) -> Any:
        if self._group is None:
            inner = self._gloo.create(self._spec, self._store)
            self._group = inner._plain
        return self._group

    def _enqueue(self, work: FakeWork) -> None:
        if self._stream is None:
            self._stream = SimpleQueue()
            threading.Thread(
                target=_run_stream, args=(self._stream,), name="fake-nccl-stream", daemon=True
            ).start()
        self._stream.put(work)

    def __del__(self) -> None:
        if self._stream is not None:
            self._stream.put(None)


class FakeWork:
    """An operation of a fake communicator, or a batch of them (``children``)."""

    def __init__(
        self,
        communicator: FakeCommunicator,
        name: str,
        outputs: list[torch.Tensor],
        results: list[torch.Tensor],
        children: list[FakeWork],
    ) -> None:
        self.inner: Any = None
        self.outputs = outputs
        self.results = results
        self.children = children
        self.ordered: set[int] = set()
        self.done = threading.Event()
        self._communicator = communicator
        self._name = name

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the calling thread after the operation; a barrier blocks, as NCCL's does."""
        self.ordered.add(get_ident())
        for child in self.children:
            child.wait()
        if self._name == "barrier":
            self.block()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self.children:
            return all(child.is_completed() for child in self.children)
        return self._communicator.aborted or self.done.is_set()

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def block(self) -> None:
        """Block the host until complete or aborted; then outputs are results or junk."""
        while not self.done.wait(_POLL_SECONDS):
            if self._communicator.aborted:
                return
        if self._communicator.aborted:
            return
        for output, result in zip(self.outputs, self.results, strict=True):
            output.copy_(result)


class StreamOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every torch operation of the thread that entered it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _order.pending and not func.is_view:
            with _disable_current_modes(), torch.no_grad():
                for tensor in tensors_in([args, kwargs or {}]):
                    _order.settle(tensor, strict=True)
        return func(*args, **(kwargs or {}))


class _Order:
    """Which memory belongs to unfinished operations."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, int, FakeWork]] = []

    def add(self, work: FakeWork) -> None:
        self.pending += [(*_extent(output), work) for output in work.outputs if output.numel()]

    def settle(self, tensor: torch.Tensor, strict: bool) -> None:
        """Complete the operations that write into ``tensor``'s memory."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return
        start, end = _extent(tensor)
        touched = [work for low, high, work in self.pending if low < end and start < high]
        for work in touched:
            if strict and get_ident() not in work.ordered:
                raise StreamOrderError(f"{work._name}: its output was used without a wait")
        for work in touched:
            work.block()
            self.pending = [entry for entry in self.pending if entry[2] is not work]


_order = _Order()
_modes: dict[int, Any] = {}


def enter_stream_order() -> None:
    """Watch the operations of the calling thread from now on."""
    if get_ident() not in _modes:
        mode: Any = StreamOrder()  # type: ignore[no-untyped-call]
        mode.__enter__()
        _modes[get_ident()] = mode


def leave_stream_order() -> None:
    """Undo :func:`enter_stream_order` on the calling thread."""
    mode = _modes.pop(get_ident(), None)
    if mode is not None:
        mode.__exit__(None, None, None)
    _order.pending.clear()


def _run_stream(stream: SimpleQueue[FakeWork | None]) -> None:
    while (work := stream.get()) is not None:
        try:
            work.inner.wait()
        except RuntimeError:
            continue  # a kernel whose peer is gone hangs until it is aborted
        work.done.set()


def _clone(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone(memory_format=torch.contiguous_format)
        return copies[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(_clone(item, copies) for item in value)
    return value


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last byte address that the tensor's elements span."""
    start = tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _fill_with_junk(tensor: torch.Tensor) -> None:
    junk = torch.full((tensor.element_size(),), JUNK_BYTE, dtype=torch.uint8)
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.copy_(junk.view(tensor.dtype).reshape(()).expand(tensor.shape))
