"""Inner groups on NCCL, written from a reading of the sources of torch 2.13.

The environment that NCCL needs, and the versions of NCCL that are refused, are in
:mod:`deadpool_megatron.support.environment`. Facts that shape this module:

A wait only orders streams, so it must run on the calling thread. Aborting communicators one after
another can deadlock (nccl#1013, pytorch#119797), so all are aborted at the same time, each by its
own thread. After an abort kernels exit and outputs are worthless, without an error. Communicators
that are made lazily need the store, so all are made before the first barrier, and a group that is
bound to a device reuses its communicator for unbatched send and receive. A pair of ranks connects
at its first message, and the host waits for the peer meanwhile. So neighbours in a pipeline
exchange a byte when their group is made (with ``NCCL_RUNTIME_CONNECT=0`` collectives connect then,
too).

An abort frees a communicator even if a thread is in a call of it. So the closing thread first sets
the flag of the epoch, then waits until no thread is in such a call, then aborts. A thread first
enters itself in ``Epoch.waits``, and then reads the flag. In CPython at least one thread then
notices the other, without a lock.

Between start and end of a coalescing block nothing may raise. NCCL counts the open blocks of each
thread (group.cc, ncclGroupDepth). An exception makes torch abandon a block
(``ProcessGroupNCCL::send``), which stays open for ever. All later operations of the thread are then
collected and never run, without an error, in every later epoch, and their outputs are old memory.
The end of a block uses the communicators of its operations, so no abort may free them before.

Below, a group of NCCL is what ncclGroupStart opens: torch opens one for each coalescing block, and
for the operations of ``inner.OPENS_A_GROUP``. A group of ranks is a communicator.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions, HashStore, Store
from torch.distributed import ProcessGroup

from deadpool_megatron import failpoints
from deadpool_megatron.comms import inner
from deadpool_megatron.comms.in_flight import works
from deadpool_megatron.comms.in_flight.device_time import CudaClock, read_positions
from deadpool_megatron.comms.in_flight.epoch import Epoch, Limits, Progress
from deadpool_megatron.comms.in_flight.waiters import WaiterPool

#: Megatron's names of the groups in which each rank sends to the next, and the last to the first:
#: pipelines with virtual stages, and TransformerEngine's attention over a split context
RINGS = ("PIPELINE_MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP")
_WARM_UP_SIZE = 256
_WARM_UP_SECONDS = 60.0
_WARM_UP_DTYPES = (torch.float32, torch.bfloat16)
#: a close waits this long for a thread in a call, which takes microseconds unless the driver hangs
MAX_INSIDE_SECONDS = 0.2
_POLL_SECONDS = 0.001
_INVALID_USAGE = 5  # ncclInvalidUsage of nccl.h: no group is open on this thread


class Blocks:
    """The open coalescing blocks of all threads on the communicators of one epoch."""

    def __init__(self, is_group_open: Callable[[], bool]) -> None:
        """``is_group_open()``: whether the calling thread is in a group of NCCL that no block here
        has opened."""
        self._is_group_open = is_group_open
        #: threads for which NCCL was asked whether a group is open
        self._checked_threads: set[int] = set()
        #: the reason why a group of NCCL stays open for ever; empty while none does
        self._left_open = ""
        self._depths: dict[int, int] = {}
        self._problems: dict[int, RuntimeError] = {}
        self._closed = False
        #: close() waited in vain for a thread: it may be in a freed communicator, or its later
        #: operations may be collected for ever
        self.cut = False

    def mark_left_open(self, operation: str) -> None:
        """Note that an exception of NCCL left the group open that ``operation`` had opened."""
        text = f"{operation} failed in a group of NCCL, and left it open"
        self._left_open = self._left_open or text

    def begin(self, operation: str) -> str:
        """Before the first operation of a thread, ask NCCL whether a group is open on it. Return
        the reason why the process must be replaced; empty if there is none."""
        if get_ident() not in self._checked_threads:
            self._checked_threads.add(get_ident())
            self.unusable_reason()  # notes an open group
        return self._left_open

    def unusable_reason(self) -> str:
        """Return the reason why operations of some thread may never run; empty if there is none.
        NCCL is asked about the calling thread."""
        if self.cut:
            return "a thread was stuck in an operation of NCCL, or in a block of them"
        if not self.is_open_here() and self._is_group_open():
            self.mark_left_open("something unknown")
        return self._left_open

    def enter(self) -> bool:
        """Open a block on the calling thread; False, with nothing open, once blocks are closed."""
        ident = get_ident()
        depth = self._depths.get(ident, 0)
        self._depths[ident] = depth + 1
        if self._closed and not depth:
            del self._depths[ident]
            return False
        return True

    def is_open_here(self) -> bool:
        """Return whether the calling thread is in a block, so that nothing may raise."""
        return get_ident() in self._depths

    def keep_error(self, problem: RuntimeError) -> None:
        """Keep the first error of an operation in the block until its end."""
        self._problems.setdefault(get_ident(), problem)

    def leave(self) -> RuntimeError | None:
        """End the innermost block of the calling thread. If it is the outermost as well, return the
        kept error."""
        ident = get_ident()
        depth = self._depths.get(ident, 1) - 1
        if depth:
            self._depths[ident] = depth
            return None
        problem = self._problems.pop(ident, None)
        self._depths.pop(ident, None)
        return problem

    def close(self, seconds: float, is_inside: Callable[[], bool]) -> None:
        """Let no block begin. Wait until no block is open and ``is_inside()`` is False; if that
        takes longer than ``seconds``, set ``cut`` and return."""
        self._closed = True
        until = time.monotonic() + seconds
        while not self.cut and (self._depths or is_inside()):
            self.cut = time.monotonic() >= until
            time.sleep(_POLL_SECONDS)


class NcclFabric(inner.Fabric):
    """The NCCL communicators of one epoch, aborted together."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._lock = threading.Lock()
        self._build_lock = threading.Lock()
        self._backends: list[Any] = []
        self._groups: list[NcclGroup] = []
        # Aborts that have begun, or are about to begin, and have not ended.
        self._aborts = 0
        self._failed_abort = ""
        self._blocks = Blocks(self._is_group_open)
        epoch.progress.stream_waits.clock = self._clock()

    def _clock(self) -> CudaClock:
        return CudaClock()

    def _is_group_open(self) -> bool:
        """Return whether the calling thread is in a group of NCCL that no block will end."""
        return is_group_open()

    def create(self, spec: inner.GroupSpec, store: Store) -> NcclGroup:
        # torch numbers backends in the order in which they are made. Only connecting takes time.
        with self._build_lock:
            plain, backend = self._build(spec, store)
        with self._lock:
            self._backends.append(backend)
        # An interrupt may have come before the registration above.
        self._epoch.check("attach")
        backend.eager_connect_single_device(spec.device)
        if self._epoch.closed:
            # No abort could reach the communicator before this moment, and no later abort will.
            self._abort(backend)
            raise inner.EpochClosed(self._epoch.number, "attach")
        group = NcclGroup(spec, self._epoch, plain, backend, self._blocks)
        if spec.description in RINGS:
            group.connect({(spec.rank + 1) % spec.size, (spec.rank - 1) % spec.size} - {spec.rank})
        self._groups.append(group)
        return group

    def skip_split(self) -> None:
        world = self._groups[0]
        world.backend().perform_nocolor_split(world._device)

    def positions(self) -> Mapping[str, inner.Position]:
        groups = list(self._groups)
        found = read_positions(self._recorded(), {group.uid for group in groups})
        return {
            group.place: group.position(*found[group.uid]) for group in groups if group.uid in found
        }

    def fault(self) -> tuple[str, str, str] | None:
        failed = next((group for group in list(self._groups) if group.error()), None)
        if failed is None:
            return None
        return failed.description, "watchdog", f"torch's watchdog reports {failed.error()}"

    def _recorded(self) -> bytes:
        """Return the dump of the flight recorder for the groups of all epochs, without single
        operations."""
        from torch._C import _distributed_c10d

        # A torch without NCCL lacks this function.
        dump = getattr(_distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
        return bytes(dump(includeCollectives=False, onlyActive=False))

    def _build(self, spec: inner.GroupSpec, store: Store) -> tuple[Any, Any]:
        """Return a plain ProcessGroup with an NCCL backend, made as by c10d's own helper."""
        from torch.distributed import ProcessGroupNCCL

        # Each thread has a current device of its own, and groups are built in another thread.
        torch.cuda.set_device(spec.device)
        options: Any = spec.options
        if options is None:
            options = ProcessGroupNCCL.Options()
            options.is_high_priority_stream = False
        timeout = spec.timeout or spec.requested_timeout
        if timeout is not None:
            options._timeout = timeout
        if spec.colour is not None:
            options = copy.deepcopy(options)  # the user's options outlive the parent set below
            options.split_from, options.split_color = self._groups[0].backend(), spec.colour
        options.global_ranks_in_group = list(spec.ranks)
        options.group_name = spec.name
        backend = ProcessGroupNCCL(store, spec.rank, spec.size, options)
        plain: Any = ProcessGroup(store, spec.rank, spec.size)
        plain._set_default_backend(ProcessGroup.BackendType.NCCL)
        plain.bound_device_id = spec.device
        plain._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
        if hasattr(ProcessGroup, "_set_sequence_number_for_group"):  # torch 2.15 counts from zero
            backend._set_sequence_number_for_group()
        plain._set_group_name(spec.name)
        plain._set_group_desc(spec.description)
        return plain, backend

    def abort(self) -> None:
        # All aborts together get ``drain_seconds``; after that they continue in their threads.
        drain_seconds = self._epoch.limits.drain_seconds
        until = time.monotonic() + drain_seconds
        inside_seconds = drain_seconds if self._epoch.in_first_step else MAX_INSIDE_SECONDS
        self._blocks.close(inside_seconds, self._is_inside)
        with self._lock:
            backends, self._backends = self._backends, []
            self._aborts += len(backends)
        fixed: Any = {"target": self._abort_counted, "name": "deadpool-nccl-abort", "daemon": True}
        threads = [threading.Thread(args=(backend,), **fixed) for backend in backends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _is_inside(self) -> bool:
        """Return whether a thread is enqueueing an operation."""
        return any(isinstance(wait, NcclGroup) for wait in list(self._epoch.waits.values()))

    def _abort_counted(self, backend: Any) -> None:
        try:
            self._abort(backend)
        finally:
            with self._lock:
                self._aborts -= 1

    def _abort(self, backend: Any) -> None:
        try:
            backend.abort()
        except RuntimeError as error:
            if "already aborted" not in str(error):
                self._failed_abort = f"an abort of NCCL failed: {error}"
                print(f"deadpool: {self._failed_abort}", file=sys.stderr, flush=True)

    def aborting(self) -> bool:
        with self._lock:
            # A close sets the flag of the epoch, waits for blocks to end, and only then aborts.
            return self._aborts > 0 or (self._epoch.closed and bool(self._backends))

    def unusable_reason(self) -> str:
        return self._blocks.unusable_reason() or self._failed_abort

    def is_quiescent(self) -> bool:
        """Return whether all aborts returned; the caller still has to synchronise the device."""
        return not self.aborting()

    def close(self) -> None:
        with self._lock:
            self._backends.clear()
        self._groups.clear()


class NcclGroup(inner.InnerGroup):
    """An NCCL communicator."""

    coalesces = True
    #: the operation that a thread enqueues, and its number
    operation = ""
    sequence = 0

    def __init__(
        self, spec: inner.GroupSpec, epoch: Epoch, plain: Any, backend: Any, blocks: Blocks
    ) -> None:
        self.epoch = epoch
        self.description = spec.description
        self.size = spec.size
        self.place = spec.place
        # The group's name in the flight recorder.
        self.uid = int(backend.uid)
        self._device = spec.device
        self._plain = plain
        self._backend = backend
        self._blocks = blocks

    def forward(
        self, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dist.Work | None:
        epoch = self.epoch
        if unusable_reason := self._blocks.begin(operation):
            epoch.fault(self.description, operation, unusable_reason)
        if operation in inner.OPENS_A_GROUP and not self._blocks.is_open_here():
            self._report_known_error(operation)
        if failpoints.ACTIVE:
            failpoints.hit("comm", op=operation, group=self.description, size=self.size)
        problem: str | None = None
        if operation == "barrier":
            args, kwargs = (_barrier_options(args, kwargs, self._device),), {}
        ident, waits = get_ident(), epoch.waits
        sequence = self.number(operation)
        self.operation, self.sequence = operation, sequence
        waits[ident] = self
        try:
            if epoch.closed:
                self._check(operation)
                if self._blocks.cut:
                    return None
            work = self._start(getattr(self._plain, operation), args, kwargs)
        except RuntimeError as error:
            if operation in inner.OPENS_A_GROUP:
                self._blocks.mark_left_open(operation)
            if self._blocks.is_open_here():
                self._blocks.keep_error(error)
                return None
            if not works.communication_failed(error) and not epoch.closed:
                raise
            problem = str(error)
        finally:
            del waits[ident]
        if problem is not None:
            epoch.fault(self.description, operation, problem)
        return self._work(work, operation, sequence)

    def _start(
        self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Start an operation; a synchronous operation is a wait of the current stream."""
        if works.is_asynchronous(args, kwargs) or self._blocks.is_open_here():
            return operation(*args, **kwargs)
        return self.epoch.progress.stream_waits.around(lambda: operation(*args, **kwargs))

    def _work(self, work: Any, operation: str, sequence: int) -> dist.Work | None:
        if work is None:
            # There is nothing to wait for: a block collects the operation, or the current stream
            # runs it.
            if not self._blocks.is_open_here():
                self.epoch.check(operation)
                works.count_finished(self, operation)
            return None
        return works.StreamWork(work, self, operation, sequence)

    def connect(self, peers: Collection[int]) -> None:
        """Exchange a byte with each peer, in the thread that makes the group."""
        sent, received = (torch.zeros(1, dtype=torch.uint8, device=self._device) for _ in range(2))
        self._start_block(self._device)
        self.messages += 1
        try:
            for peer in sorted(peers):
                self._plain.send([sent], peer, 0)
                self._plain.recv([received], peer, 0)
        finally:
            self._end_block(self._device)

    def error(self) -> str:
        """Return the error that torch's watchdog has found; empty for none, or if torch is too old
        to be asked."""
        ask = getattr(self._backend, "get_error", None)
        found = "SUCCESS" if ask is None else str(ask().name)
        return "" if found == "SUCCESS" else found

    def position(self, enqueued: int, started: int | None, completed: int) -> inner.Position:
        """Return the device's progress with the group, by these numbers of the flight recorder."""
        if self.error():
            completed = min(completed, enqueued - 1)
        return inner.Position(enqueued, started, completed, collective=not self.messages)

    def backend(self) -> Any:
        return self._backend

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "_start_coalescing":
            return self._start_block(*args)
        if method == "_end_coalescing":
            return self._end_block(*args)
        self._check(method)
        return getattr(self._plain, method)(*args, **kwargs)

    def _check(self, operation: str) -> None:
        """Raise EpochClosed on a closed epoch, unless this thread has an open block: an abort waits
        for its end."""
        if not self._blocks.is_open_here():
            self.epoch.check(operation)

    def _report_known_error(self, operation: str) -> None:
        """Report an error of the communicator before a group of NCCL is opened: the error would
        leave that group open."""
        if error := self.error():
            self.epoch.fault(self.description, operation, f"torch's watchdog reports {error}")

    def _start_block(self, device: torch.device) -> None:
        self._check("start of a block")
        if not self._blocks.is_open_here():
            self._report_known_error("coalesced")
        if not self._blocks.enter():
            raise inner.EpochClosed(self.epoch.number, "start of a block")
        try:
            self._plain._start_coalescing(device)
        except BaseException:
            self._blocks.leave()
            raise

    def _end_block(self, device: torch.device) -> dist.Work | None:
        """End the block in NCCL in any case; then report an error of the block."""
        answer = None
        ident, waits = get_ident(), self.epoch.waits
        self.operation, self.sequence = "coalesced", self.messages
        waits[ident] = self
        try:
            if not self._blocks.cut:
                answer = self._plain._end_coalescing(device)
        except RuntimeError as error:
            self._blocks.mark_left_open("the end of a block")
            self._blocks.keep_error(error)
        finally:
            del waits[ident]
        problem = self._blocks.leave()
        self._check("end of a block")
        if problem is not None:
            if not works.communication_failed(problem):
                raise problem
            self.epoch.fault(self.description, "coalesced", str(problem))
        return self._work(answer, "coalesced", self.messages)

    def set_timeout(self, timeout: timedelta) -> None:
        self._backend._set_default_timeout(timeout)

    def close(self) -> None:
        self._plain = self._backend = None


def _barrier_options(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> BarrierOptions:
    """Return the options of a barrier that returns a Work, on the device of its group.

    A barrier without a Work would hold the host in a wait that no other thread sees. Without a
    device torch would use the thread's current device, by default the first device of the node, on
    which the process would create a context.
    """
    opts = BarrierOptions()
    for given in (*args, *kwargs.values()):
        if isinstance(given, BarrierOptions):
            opts = given
        elif isinstance(given, timedelta):
            opts.timeout = given
    opts.asyncOp = True
    if getattr(opts.device, "index", None) is None:
        opts.device = device
    return opts


def warm(device: torch.device, make: Callable[[Epoch], NcclFabric] = NcclFabric) -> None:
    """Load NCCL's kernels before a recovery has to wait for them: make a communicator of a single
    rank, use it for each collective of training, and abort it.

    NCCL inspects each of its kernels for a communicator, which loads the kernel; torch loads its
    own kernels at the first use of an operation. A single rank needs no peer for that: NCCL then
    only copies, so no connection is opened. This function has never run on a GPU.

    The calling thread must not be in an epoch. Raises RuntimeError as NCCL does.
    """
    limits = Limits(_WARM_UP_SECONDS, 0.0, _WARM_UP_SECONDS, 0.0)
    epoch = Epoch(0, limits, WaiterPool(), Progress(), None)
    fabric = make(epoch)
    epoch.fabrics["nccl"] = fabric
    limit = timedelta(seconds=_WARM_UP_SECONDS)
    spec = inner.GroupSpec("warm-up", "deadpool-warm-up", (0,), 0, device, requested_timeout=limit)
    try:
        group = fabric.create(spec, HashStore())
        for operation, args in _warm_up_operations(device):
            work = group.forward(operation, args, {})
            if work is not None:
                work.wait()  # the barrier, the last operation, holds the host
    finally:
        epoch.close()
        fabric.close()


def _warm_up_operations(device: torch.device) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in _WARM_UP_DTYPES:
        source, target = (torch.zeros(_WARM_UP_SIZE, dtype=dtype, device=device) for _ in range(2))
        yield "allreduce", ([source],)
        yield "broadcast", ([source],)
        yield "_allgather_base", (target, source)
        yield "_reduce_scatter_base", (target, source)
        yield "alltoall_base", (target, source, [], [])
    yield "barrier", ()


@functools.cache
def _group_end() -> Callable[[], int] | None:
    """Return ``ncclGroupEnd`` of the library that torch has loaded; None where it is part of
    torch."""
    try:
        function: Callable[[], int] = ctypes.CDLL("libnccl.so.2").ncclGroupEnd
    except (OSError, AttributeError):
        return None
    return function


def is_group_open() -> bool:
    """Return whether the calling thread is in a group of NCCL, and end that group: NCCL can only be
    asked by ``ncclGroupEnd``. Needs no device.
    """
    end = _group_end()
    return end is not None and end() != _INVALID_USAGE
