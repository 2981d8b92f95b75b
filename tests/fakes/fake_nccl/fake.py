"""NCCL's semantics on CPU tensors, on top of gloo, so that tests find NCCL's traps without a GPU.

Modelled:

* An operation is asynchronous; its outputs hold junk from launch to completion. ``wait()``
  returns at once and only orders the *calling thread* after the operation. A later access to the
  memory blocks until the result is there, and needs that wait: see stream_order.py.
* After an abort everything completes, outputs keep their junk, and nothing raises. So does an
  operation whose peer died, but only when aborted: until then it hangs, as kernels do. An operation
  that was complete before the abort has its result.
* The watchdog of torch may notice a dead peer before our abort. It works on copies of operations:
  a wait for a failed operation raises nothing (except for a barrier), reading an output hangs, and
  only ``get_error()`` and the next operation that is enqueued report it. The watchdog releases
  failed operations and calls them completed. It also sleeps with a lock that enqueueing takes
  (:data:`DUMP_MILLISECONDS`).
* Memory that an operation does not write stays good: its own input in an in-place all-gather, the
  source of a broadcast, the operand of a rank that is not the root of a reduce.
* A block of coalesced operations belongs to the calling thread: see collected.py.
* An operation that the caller does not make asynchronous runs on the current stream and answers no
  Work; a barrier of that kind holds the host.
* To set up a communicator may take long (:data:`set_up`), and no abort reaches it meanwhile.
* An abort takes time, more with every operation that has not ended (:data:`abort_lasts`), frees
  what other threads are in (:data:`enqueue_lasts`), and may fail (:data:`abort_fails`).
* The first message of a pair holds the host until the peer is there, and so does the first
  collective of a communicator, unless it has connected them as it was made (:data:`CONNECT`).
* torch keeps the operands of an asynchronous operation alive until a thread waits for it, or the
  communicator is freed.
* With :data:`NAN_CHECK` a kernel asserts on an operand that is not a number, which leaves the
  device of the process in error for good: every call that asks it raises, ours in any thread too.
* Send and receive outside a coalescing block are an error (:data:`allow_unbatched`), because two
  neighbours that both send first deadlock.
* A communicator that was not connected eagerly is made at its first use through the store, and so
  fails if the store is gone.

Nothing here is fast. The junk is finite and small, so that a check for NaN does not find it.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import get_ident
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, Store

from deadpool_megatron.comms.gathers import SeveralWorks
from deadpool_megatron.comms.gloo import GlooFabric, GlooGroup
from deadpool_megatron.comms.in_flight.device_time import CudaClock
from deadpool_megatron.comms.in_flight.epoch import Epoch
from deadpool_megatron.comms.in_flight.works import (
    communication_failed,
    is_asynchronous,
    tensors_in,
)
from deadpool_megatron.comms.inner import (
    COMMUNICATION,
    OPENS_A_GROUP,
    POINT_TO_POINT,
    SENDS,
    GroupSpec,
)
from deadpool_megatron.comms.nccl import NcclFabric
from fake_nccl.collected import FreedCommunicatorError, collected
from fake_nccl.stream_order import StreamOrderError, enter_stream_order, order, unwatched

__all__ = ["FakeCommunicator", "FakeNcclFabric", "FakeWork", "StreamOrderError"]

#: let isend and irecv pass outside a batch, as on communicators bound to a device; for a whole job
#: by the environment. Megatron's interleaved schedule needs it: even ranks send first and odd ones
#: receive first, so it avoids by itself what is refused here.
allow_unbatched = os.environ.get("DEADPOOL_FAKE_NCCL_UNBATCHED") == "1"

ABORT_SECONDS = 0.5
ABORT_SECONDS_PER_OPERATION = 0.01


def _no_time(seconds: float) -> None:
    """The default: aborts take no time."""


#: called by each abort with the seconds that it lasts on a device; a test sets its own
abort_lasts: Callable[[float], None] = _no_time


def _at_once(communicator: FakeCommunicator) -> None:
    """The default: a communicator is set up as soon as all peers are there."""


#: called while a communicator is set up; returns when it is
set_up: Callable[[FakeCommunicator], None] = _at_once

#: the variable of torch whose value, four times, is how long its watchdog holds the lock
DUMP_MILLISECONDS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_DEFAULT_DUMP_MILLISECONDS = "15000"

JUNK_BYTE = 0x3C
#: torch numbers the groups of a process, over all epochs
_uids = itertools.count()
_POLL_SECONDS = 0.01


#: not empty: the text of the error with which an abort fails
abort_fails = ""


def _no_longer(communicator: FakeCommunicator) -> None:
    """The default: an operation is enqueued at once."""


#: called by a thread that is inside of NCCL; an abort meanwhile frees what it is in
enqueue_lasts: Callable[[FakeCommunicator], None] = _no_longer

#: the variable of torch that has a kernel look for operands that are not numbers
NAN_CHECK = "TORCH_NCCL_NAN_CHECK"

#: the variable of NCCL by which collectives connect at their first use (1, the default), or before
CONNECT = "NCCL_RUNTIME_CONNECT"


class FakeNcclFabric(NcclFabric):
    """Fake communicators of one epoch, aborted together."""

    def __init__(self, epoch: Epoch, address: str = "127.0.0.1") -> None:
        enter_stream_order()
        super().__init__(epoch)
        self._gloo = GlooFabric(epoch, address)
        self._communicators: list[FakeCommunicator] = []

    def _clock(self) -> FakeClock:
        return FakeClock()

    def _is_group_open(self) -> bool:
        return collected.depth > 0

    def _build(self, spec: GroupSpec, store: Store) -> tuple[Any, Any]:
        communicator = FakeCommunicator(spec, store, self._gloo, self._epoch)
        if spec.colour is not None:
            communicator.parent = self._groups[0].backend()
        self._communicators.append(communicator)
        return communicator, communicator

    def _recorded(self) -> bytes:
        status = {str(each.uid): each.recorded() for each in list(self._communicators)}
        return json.dumps({"pg_status": status}).encode()

    def abort(self) -> None:
        super().abort()
        self._gloo.abort()

    def is_quiescent(self) -> bool:
        return super().is_quiescent() and self._gloo.is_quiescent()

    def close(self) -> None:
        super().close()
        self._communicators.clear()
        self._gloo.close()


@dataclass(frozen=True)
class FakeMark:
    """A place in the stream of a thread: after what this thread has done by ``at_seconds``, and
    after these operations."""

    at_seconds: float
    after: Sequence[FakeWork]


class FakeClock(CudaClock):
    """A stream comes to a mark when the operations are over that were ordered before it."""

    def mark(self) -> Any:
        works = [work for work in order.after_current_thread() if isinstance(work, FakeWork)]
        return FakeMark(monotonic(), works)

    def is_recorded(self) -> bool:
        return False

    def is_passed(self, mark: Any) -> bool:
        order.settle([])
        return all(operation.is_over() for operation in mark.after)

    def seconds(self, earlier: Any, later: Any) -> float:
        return _passed_at(later) - _passed_at(earlier)

    def forget(self, mark: Any) -> None:
        """Nothing is used again."""


def _passed_at(mark: FakeMark) -> float:
    return max([mark.at_seconds, *(operation.ended_at_seconds for operation in mark.after)])


class FakeCommunicator:
    """Plays both the plain ProcessGroup and its NCCL Backend."""

    supports_splitting = False
    supports_coalescing = True

    def __init__(self, spec: GroupSpec, store: Store, gloo: GlooFabric, epoch: Epoch) -> None:
        self._spec = spec
        self._store = store
        self._gloo = gloo
        self._epoch = epoch
        self._group: GlooGroup | None = None
        self._stream: SimpleQueue[FakeWork | None] | None = None
        self._launched = self._ended = 0
        # Collectives and messages are counted apart; the recorder has the last number.
        self._counts = {True: 0, False: 0}
        self._enqueued = self._completed = -1
        self._connected: set[int | None] = set()
        self.retained: dict[int, tuple[Any, ...]] = {}
        self._in_set_up = False
        self._noticed_at_seconds: float | None = None
        self.aborted = False
        #: WORLD's, if it is made by a split, and how many it has taken part in itself
        self.parent: FakeCommunicator | None = None
        self.splits = 0
        self.uid = next(_uids)

    # -- as a Backend ----------------------------------------------------------------------------

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._in_set_up = True
        if self.parent is not None and self._spec.colour is not None:
            found = self.parent.split(self._spec.colour)
            if found != self._spec.ranks:
                raise dist.DistBackendError(f"a split for {self._spec.ranks} has {found}")
        self._connect()
        set_up(self)
        self._in_set_up = False
        if os.environ.get(CONNECT) == "0":
            self._connected.add(None)

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.split(-1)

    def split(self, colour: int) -> tuple[int, ...]:
        """Return the ranks with this colour. All ranks take part, each time, or wait for ever."""
        self.splits += 1
        with unwatched():
            colours = [torch.zeros(1) for _ in self._spec.ranks]
            own = torch.tensor([float(colour)])
            self._connect()._starts["allgather"]([colours], [own]).wait()
            return tuple(rank for rank, other in enumerate(colours) if other.item() == colour)

    def abort(self) -> None:
        if self._in_set_up:
            return  # NCCL has no handle of it yet
        pending = self._launched - self._ended
        abort_lasts(ABORT_SECONDS + pending * ABORT_SECONDS_PER_OPERATION)
        if abort_fails:
            raise dist.DistBackendError(abort_fails)
        self.aborted = True

    def get_error(self) -> ErrorType:
        """As torch: the first thing that the watchdog has found."""
        noticed = self._noticed_at_seconds is not None
        return ErrorType.COMM_ERROR if noticed else ErrorType.SUCCESS

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
        collected.depth += 1

    def _end_coalescing(self, device: torch.device) -> FakeWork | None:
        works = [work for work in collected.end() if work is not None]
        for work in works:
            self._await_peer(work)
        return FakeWork(self, "coalesced", [], [], works) if works else None

    def _launch(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FakeWork | None:
        self._take_lock_of_watchdog()
        if self._noticed_at_seconds is not None and not self.aborted:
            if name in OPENS_A_GROUP:
                collected.depth += 1  # torch throws between the start and the end of a group
            raise dist.DistBackendError("a remote process has exited or there was a network error")
        if collected.depth:
            collected.add(self, partial(self._start, name, args, kwargs))
            return None
        if name in POINT_TO_POINT and not allow_unbatched:
            raise StreamOrderError(
                f"unbatched {name} on {self._spec.description}: NCCL may deadlock"
            )
        self._await_memory(name, args)
        work = self._start(name, args, kwargs)
        if work is not None:
            self._await_peer(work)
        return work

    def _await_memory(self, name: str, args: tuple[Any, ...]) -> None:
        """Wait for what others write into its operands. On a device the stream does: the host is
        not inside meanwhile, and finds the close of the epoch in its next call."""
        inside = self._epoch.waits.pop(get_ident(), None)
        try:
            order.settle(args, strict=False)
        finally:
            if inside is not None:
                self._epoch.waits[get_ident()] = inside
        self._epoch.check(name)

    def _await_peer(self, work: FakeWork) -> None:
        """NCCL connects inside of the call that enqueues: the host waits for its peers there."""
        if work.peer not in self._connected:
            self._connected.add(work.peer)
            work.hold()
            if self.aborted and not work.has_ended:
                raise FreedCommunicatorError(f"{work.name} connects in what an abort has freed")

    def _start(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FakeWork | None:
        if self.aborted:
            raise dist.DistBackendError("the communicator was aborted")
        enqueue_lasts(self)
        if self.aborted:
            raise FreedCommunicatorError(f"{name} went on in what an abort has freed")
        waited_for = is_asynchronous(args, kwargs)
        if name == "barrier":
            args, kwargs = (), {}
        group = self._connect()
        order.settle(args, strict=False)
        with unwatched():
            copies: dict[int, torch.Tensor] = {}
            private = _clone(args, copies)
            written = list(_written(name, args, kwargs, self._spec.rank, copies))
            work = FakeWork(self, name, [o for o, _ in written], [r for _, r in written], [])
            for output in work.outputs:
                _fill_with_junk(output)
            try:
                work.inner = group._starts[name](*private, **kwargs)
            except RuntimeError as error:
                if not communication_failed(error):
                    raise
                work.inner = NeverEnding(error)
            order.add(work)
        if os.environ.get(NAN_CHECK) == "1" and any(copy.isnan().any() for copy in copies.values()):
            order.error = "CUDA error: device-side assert triggered"
        is_message = name in POINT_TO_POINT
        work.peer = int(args[1]) if is_message else None
        self._counts[is_message] += 1
        work.number = self._enqueued = self._counts[is_message]
        self._enqueue(work)
        if waited_for:
            self.retained[id(work)] = args
            return work
        self._await_peer(work)
        work.wait()
        return None

    def _connect(self) -> GlooGroup:
        if self._group is None:
            self._group = self._gloo.create(self._spec, self._store)
        return self._group

    def _enqueue(self, work: FakeWork) -> None:
        if self._stream is None:
            self._stream = SimpleQueue()
            threading.Thread(
                target=_run_stream, args=(self._stream,), name="fake-nccl-stream", daemon=True
            ).start()
        self._launched += 1
        self._stream.put(work)

    def _take_lock_of_watchdog(self) -> None:
        if self._noticed_at_seconds is None:
            return
        held_seconds = 4e-3 * int(os.environ.get(DUMP_MILLISECONDS, _DEFAULT_DUMP_MILLISECONDS))
        while not self.aborted and monotonic() < self._noticed_at_seconds + held_seconds:
            sleep(_POLL_SECONDS)

    def noticed(self) -> None:
        """The watchdog has seen that an operation failed."""
        self._noticed_at_seconds = self._noticed_at_seconds or monotonic()
        self._completed = self._enqueued

    def ended(self, number: int) -> None:
        """An operation has come to its end by itself."""
        self._ended += 1
        self._completed = number

    def recorded(self) -> dict[str, str]:
        """Return its entry of the flight recorder, without events at the start of operations."""
        return {
            "last_enqueued_collective": str(self._enqueued),
            "last_started_collective": "-1",
            "last_completed_collective": str(self._completed),
        }

    def __del__(self) -> None:
        if self._stream is not None:
            self._stream.put(None)


class FakeFuture(torch.futures.Future[list[torch.Tensor]]):
    """NCCL's future of an operation: complete at once for callbacks, which a device would order.

    A wait in C++, as of DistributedDataParallel, cannot be observed; so it blocks the host until
    the operation is over.
    """

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def value(self) -> list[torch.Tensor]:
        return self._outputs

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)


@dataclass(frozen=True)
class NeverEnding:
    """A kernel that was launched, and whose peer is gone."""

    error: RuntimeError

    def wait(self) -> None:
        raise self.error


class FakeWork:
    """An operation of a fake communicator, or a batch of them (``children``).

    ``results`` are the private memory from which the ``outputs`` are filled when it is over.
    """

    def __init__(
        self,
        communicator: FakeCommunicator,
        name: str,
        outputs: list[torch.Tensor],
        results: list[torch.Tensor],
        children: list[FakeWork],
    ) -> None:
        self.inner: Any = None
        self.name = name
        self.outputs = outputs
        self.ordered: set[int] = set()
        self._results = results
        self._children = children
        self._communicator = communicator
        self.ended_at_seconds = 0.0
        self.number = 0
        self.peer: int | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._outcome: bool | None = None
        self._error: RuntimeError | None = None
        self._future: FakeFuture | None = None

    def get_future(self) -> FakeFuture:
        """See :class:`FakeFuture`."""
        with self._lock:
            self._future = self._future or FakeFuture(self.outputs)
        if self._done.is_set():
            self._let_go()
        return self._future

    def _let_go(self) -> None:
        """Order a thread that waits for the future after the operation."""
        with self._lock:
            future = self._future
        if future is not None and not torch.futures.Future.done(future):
            self.block()
            order.forget(self)
            torch.futures.Future.set_result(future, self.outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the calling thread after the operation; a barrier blocks, as NCCL's does."""
        self.ordered.add(get_ident())
        self._communicator.retained.pop(id(self), None)
        for child in self._children:
            child.wait()
        if self.name == "barrier":
            self.hold()
            if self._error is not None:
                raise self._error
            self.block()
        return True

    def hold(self) -> None:
        """Hold the host until it is over, or has failed."""
        while not self.is_completed():
            self._done.wait(_POLL_SECONDS)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._error is not None or self.is_over()

    @property
    def has_ended(self) -> bool:
        """Return whether it has a result."""
        return self._done.is_set()

    def is_over(self) -> bool:
        if self._children:
            return all(child.is_over() for child in self._children)
        return self._communicator.aborted or self._done.is_set()

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        """The watchdog's copy has it."""

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def block(self, limit_seconds: float | None = None) -> bool:
        """Block the host until over; answers True with results in the outputs, False with junk."""
        until = None if limit_seconds is None else monotonic() + limit_seconds
        while not self._done.wait(_POLL_SECONDS) and not self._communicator.aborted:
            if until is not None and monotonic() > until:
                raise TimeoutError(f"{self.name} is not over after {limit_seconds:g} s")
        with self._lock, unwatched():
            if self._outcome is None:
                self._outcome = self._done.is_set()
                if self._outcome:
                    for output, result in zip(self.outputs, self._results, strict=True):
                        output.copy_(result)
                self._results = []
            return self._outcome

    def run(self) -> None:
        """Perform the operation after its predecessors in the stream."""
        try:
            self.inner.wait()
        except RuntimeError as error:
            # A kernel whose peer is gone hangs until it is aborted; the watchdog knows better.
            if not self._communicator.aborted:
                self._communicator.noticed()
                self._error = dist.DistBackendError(str(error))
            else:
                self._let_go()
            return
        if isinstance(self.inner, SeveralWorks):
            self.inner.copy_results()
        self.ended_at_seconds = monotonic()
        self._communicator.ended(self.number)
        if not self._communicator.aborted:
            self._done.set()
        self._let_go()


def _run_stream(stream: SimpleQueue[FakeWork | None]) -> None:
    while (work := stream.get()) is not None:
        work.run()
        del work  # what it holds is not kept until the next one comes


def _clone(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone(memory_format=torch.contiguous_format)
        return copies[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(_clone(item, copies) for item in value)
    return value


def _written(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rank: int,
    copies: dict[int, torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the operation writes: (memory of the caller, private memory with the result)."""
    if name in SENDS or not args:
        return
    root = getattr(kwargs.get("opts", args[-1]), "rootRank", None)
    if (name == "broadcast" and root == rank) or (name == "reduce" and root != rank):
        return
    inputs = list(tensors_in(args[1:])) if "gather" in name else []
    for output in tensors_in(args[0]):
        result = copies[id(output)]
        own = next((tensor for tensor in inputs if _contains(output, tensor)), None)
        if own is None:
            yield output, result
            continue
        # In place: the own part is there already.
        start = (own.data_ptr() - output.data_ptr()) // output.element_size()
        for part in (slice(0, start), slice(start + own.numel(), None)):
            if output.view(-1)[part].numel():
                yield output.view(-1)[part], result.view(-1)[part]


def _contains(outer: torch.Tensor, inner: torch.Tensor) -> bool:
    if not (outer.numel() and inner.numel() and outer.is_contiguous() and inner.is_contiguous()):
        return False
    start = outer.data_ptr()
    return start <= inner.data_ptr() < start + outer.numel() * outer.element_size()


def _fill_with_junk(tensor: torch.Tensor) -> None:
    junk = torch.full((tensor.element_size(),), JUNK_BYTE, dtype=torch.uint8)
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.copy_(junk.view(tensor.dtype).reshape(()).expand(tensor.shape))
