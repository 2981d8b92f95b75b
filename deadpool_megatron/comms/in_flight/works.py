"""The Work objects that callers get: plain c10d Works with an abandonable wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import get_ident
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.comms.gathers import SeveralWorks, failure_of
from deadpool_megatron.comms.in_flight.epoch import Epoch, UnfinishedOperation
from deadpool_megatron.comms.in_flight.waiters import Abandoned, Waiter
from deadpool_megatron.comms.inner import POINT_TO_POINT, RECEIVES, CommunicatorFault, EpochClosed

#: a wait for a collective notices a close after this time; each slice that ends unfinished costs an
#: exception (tens of microseconds)
SLICE = timedelta(milliseconds=50)


class WorkGroup(Protocol):
    """The part of its inner group that a Work uses."""

    epoch: Epoch
    description: str
    place: str
    size: int


class SeamWork(dist.Work):
    """The base of our Works, which forwards everything to the inner Work ``inner``.

    Attributes ``place``, ``operation`` and ``sequence`` name it in diagnostics.
    """

    __slots__ = ("epoch", "group", "inner", "operation", "sequence")

    def __init__(self, inner: Any, group: WorkGroup, operation: str, sequence: int) -> None:
        super().__init__()
        self.inner = inner
        self.epoch = group.epoch
        self.group = group
        self.operation = operation
        self.sequence = sequence

    @property
    def description(self) -> str:
        """The description of the group."""
        return self.group.description

    @property
    def place(self) -> str:
        """The group by its description and ranks."""
        return self.group.place

    def is_completed(self) -> bool:
        """As torch; raises EpochClosed on a closed epoch, since a poll would never end."""
        self.epoch.check(self.operation)
        return bool(self.inner.is_completed())

    def synchronize(self) -> None:
        self.epoch.check(self.operation)
        self.inner.synchronize()

    def block_current_stream(self) -> None:
        self.epoch.check(self.operation)
        self.inner.block_current_stream()

    def get_future(self) -> Any:
        """Return the inner future; a wait on it ends with the operation, or with the epoch."""
        return ending_with(self.epoch, self.inner.get_future(), self.operation)


def _to_inner(name: str) -> Callable[..., Any]:
    def method(self: SeamWork) -> Any:
        return getattr(self.inner, name)()

    return method


for _name in (
    *("is_success", "exception", "result", "get_future_result"),
    *("source_rank", "_source_rank", "_get_op_type", "_get_duration"),
):
    setattr(SeamWork, _name, _to_inner(_name))


def count_finished(group: WorkGroup, operation: str) -> None:
    """Count an operation that its caller has finished with."""
    group.epoch.progress.finished += 1
    if failpoints.ACTIVE:
        failpoints.hit("comm.done", op=operation, group=group.description, size=group.size)


def ending_with(epoch: Epoch, inner: Any, operation: str) -> Any:
    """Return a future with the outcome of ``inner``; a close of ``epoch`` ends it at once.

    Its error is then a RuntimeError that quotes EpochClosed. Tensors may still be written to.
    DistributedDataParallel waits in C++ for the future of an operation, a wait that cannot be
    abandoned. Most of gloo's operations end when their connections are cut; a few in a thousand
    only end at their timeout.
    """
    start: torch.futures.Future[None] = torch.futures.Future()
    once = threading.Lock()
    serial = next(epoch.serials)

    def end(*_: object) -> None:
        if once.acquire(blocking=False):
            epoch.ends.pop(serial, None)
            start.set_result(None)

    def outcome(_: object) -> Any:
        epoch.check(operation)
        return inner.value()

    outer = start.then(outcome)
    epoch.ends[serial] = end
    inner.add_done_callback(end)
    if epoch.closed:
        end()
    return outer


class HostWork(SeamWork):
    """A Work whose wait blocks the host (gloo), and can be abandoned.

    ``in_thread``: another thread makes the inner wait, which ignores a timeout or is broken
    by it (a timed wait on a gloo send or receive closes all connections); otherwise the caller
    waits in slices. ``operands`` are kept until completion. With ``tracked``, aliases of their
    storage are kept, since the caller may exchange the storage of its tensors meanwhile, as
    Megatron's deallocate_output_tensor does. ``writes``: whether the operation writes into memory
    of the caller while it runs. ``after`` is called when it has finished.
    """

    __slots__ = (
        *("_after", "_done", "_failed", "_in_thread"),
        *("_waiter", "_operands", "_serial", "_writes"),
    )

    def __init__(
        self,
        inner: Any,
        group: WorkGroup,
        operation: str,
        sequence: int,
        operands: Any,
        in_thread: bool,
        tracked: bool,
        writes: bool,
        after: Callable[[], None] | None,
    ) -> None:
        super().__init__(inner, group, operation, sequence)
        self._in_thread = in_thread
        self._writes = writes
        self._after = after
        self._done = False
        self._failed = False
        self._waiter: Waiter | None = None
        if tracked:
            # detach() makes another TensorImpl on the same storage, which outlives `.data = ...`.
            self._operands: Any = [tensor.detach() for tensor in tensors_in(operands)]
            self._serial = next(self.epoch.serials)
            self.epoch.in_flight[self._serial] = self
        else:
            self._operands = operands
            self._serial = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until finished; any thread.

        Raises EpochClosed when the epoch is closed (also if the operation itself succeeded: its
        peers may not have), CommunicatorFault, or the RuntimeError of an expired ``timeout``.
        """
        epoch = self.epoch
        if self._done:
            epoch.check(self.operation)
            return True
        ident, waits = get_ident(), epoch.waits
        waits[ident] = self
        began = monotonic()
        try:
            if timeout is not None and timeout.total_seconds() <= 0:
                timeout = None  # no timeout in C++
            problem = self._wait_pooled(timeout) if self._in_thread else self._wait_sliced(timeout)
        finally:
            del waits[ident]
            if ident == epoch.main_ident:
                epoch.progress.waited_seconds += monotonic() - began
        if problem is not None:
            self._failed = True
            self._abandon()
            epoch.fault(self.description, self.operation, problem)
        if epoch.closed:
            self._abandon()
            raise EpochClosed(epoch.number, f"{self.operation} on {self.description}")
        if self._after is not None:
            self._after()
        self._done = True
        self._release()
        count_finished(self.group, self.operation)
        return True

    def _wait_sliced(self, timeout: timedelta | None) -> str | None:
        """Return the text of a failure, None when finished or closed."""
        inner, epoch = self.inner, self.epoch
        until = None if timeout is None else monotonic() + timeout.total_seconds()
        step = SLICE if timeout is None else min(SLICE, timeout)
        while True:
            try:
                inner.wait(step)
                return None
            except RuntimeError:
                if inner.is_completed():
                    return failure_of(inner)  # inner may have completed just after the slice
                if isinstance(inner, SeveralWorks) and (failure := inner.failure()) is not None:
                    return failure
                if until is not None and monotonic() >= until:
                    raise
            if epoch.closed and monotonic() >= epoch.grace_over:
                return None

    def _wait_pooled(self, timeout: timedelta | None) -> str | None:
        inner = self.inner
        call = inner.wait if timeout is None else lambda: inner.wait(timeout)
        if self.operation not in POINT_TO_POINT:
            call = _in_mode_of_caller(call)
        try:
            self.epoch.pool.call(call, self.epoch)
        except Abandoned as abandoned:
            self._waiter = abandoned.waiter  # the exception's traceback would hold this frame
        except RuntimeError as error:
            return str(error)
        return None

    def is_completed(self) -> bool:
        completed = self._done or super().is_completed()
        if completed and self._after is not None and self.inner.is_success():
            self.wait()  # copies the results: a caller that polls reads the outputs next
        return completed

    # -- Pending ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait on behalf of a caller that dropped this Work."""
        self.wait()

    def unfinished_in(self) -> UnfinishedOperation | None:
        """After the close of the epoch, return the operation if it may still write into its
        outputs."""
        if self._done or not self._writes:
            return None
        if self.operation in RECEIVES:
            ended = self._failed or (self._waiter is not None and self._waiter.finished)
            return None if ended else UnfinishedOperation(self.group, None, receives=True)
        if self._in_thread:
            # The inner wait of such an operation copies the result, so only a running wait writes.
            if self._waiter is None or self._waiter.finished:
                return None
            return UnfinishedOperation(self.group, self._waiter.native_id)
        return None if self.inner.is_completed() else UnfinishedOperation(self.group, None)

    def _abandon(self) -> None:
        """Keep operands alive until the reaper has freed the inner group."""
        if self._serial < 0:
            self._operands = [tensor.detach() for tensor in tensors_in(self._operands)]
        self.epoch.abandoned.append(self)

    def _release(self) -> None:
        self._operands = None
        self._after = None
        if self._serial >= 0:
            self.epoch.in_flight.pop(self._serial, None)


def _in_mode_of_caller(wait: Callable[[], Any]) -> Callable[[], None]:
    """Return a call for another thread with the caller's modes of autograd, as the wait copies
    outputs."""
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def call() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            wait()

    return call


class StreamWork(SeamWork):
    """A Work whose wait makes the calling thread's stream wait (NCCL), and does not block the host.

    It must therefore run on the calling thread.
    """

    __slots__ = ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the operation.

        After an abort the inner wait may return normally with worthless outputs. Then this call
        raises EpochClosed; a caller that reads outputs later must check by itself.
        """
        epoch = self.epoch
        epoch.check(self.operation)
        ident = get_ident()
        epoch.waits[ident] = self
        problem: str | None = None
        try:
            wait = self.inner.wait if timeout is None else lambda: self.inner.wait(timeout)
            epoch.progress.stream_waits.around(wait)
        except RuntimeError as error:
            problem = str(error)
        finally:
            epoch.waits.pop(ident, None)
        if problem is not None:
            epoch.fault(self.description, self.operation, problem)
        epoch.check(self.operation)
        count_finished(self.group, self.operation)
        return True

    def get_future(self) -> Any:
        """Return the inner future itself, which has the events that order streams. It is complete
        when the operation is enqueued, so no wait hangs in it. A future made here would not order
        streams (ATen/core/ivalue_inl.h: a future knows its devices from the start, or has none)."""
        self.epoch.check(self.operation)
        return self.inner.get_future()


class CompletedWork(dist.Work):
    """The Work of an operation that was complete when it returned."""

    __slots__ = ("_outputs",)

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    is_completed = is_success = wait

    def exception(self) -> Any:
        return None

    synchronize = block_current_stream = exception

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def source_rank(self) -> int:
        return 0

    _source_rank = source_rank


def communication_failed(error: RuntimeError) -> bool:
    """Return whether an error at the start of an operation comes from the network.

    Other errors (a wrong shape, a wrong dtype) are the caller's own and pass through.
    """
    text = str(error)
    return isinstance(error, dist.DistError | CommunicatorFault) or "/gloo/" in text


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples and dictionaries of an operation's arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def is_asynchronous(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Return whether the caller will wait later, by the options; without options it will."""
    options = kwargs.get("opts") if kwargs else None
    if options is None and args:
        options = args[-1]
    return bool(getattr(options, "asyncOp", True))
