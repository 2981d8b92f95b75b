"""Inner groups on gloo: a device per epoch, abandonable waits, uneven collectives.

Operations and defaults are those of a plain ProcessGroup with a gloo backend, so results are bit
for bit the same. Gloo has no abort, so an interruption cuts its connections and abandons the waits
that remain: a device registers all its sockets with a single epoll descriptor, and the kernel lists
them in /proc/self/fdinfo; ``shutdown(2)`` on each ends most pending operations within milliseconds.
Linux only.

all_gather and reduce_scatter with a different size per rank, which gloo refuses and NCCL accepts,
become a broadcast (or reduce) per rank. All ranks see the same list of sizes, so they agree on when
to do so. Plain calls go to gloo unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import BroadcastOptions, ProcessGroup, ProcessGroupGloo, ReduceOptions

from deadpool_megatron import failpoints
from deadpool_megatron.comms import inner
from deadpool_megatron.comms.gathers import REPLACEMENTS, SeveralWorks
from deadpool_megatron.comms.in_flight.epoch import Activity, Epoch
from deadpool_megatron.comms.in_flight.waiters import Abandoned
from deadpool_megatron.comms.in_flight.works import HostWork, communication_failed, is_asynchronous
from deadpool_megatron.comms.inner import COMMUNICATION, POINT_TO_POINT, GroupSpec

#: operations whose inner Work is run by wait() itself, which then ignores a timeout
_RUN_BY_WAIT = frozenset(name for name in COMMUNICATION if "reduce_scatter" in name)
#: operations whose waits another thread makes: see ``in_thread`` of HostWork
_WAIT_IN_THREAD = POINT_TO_POINT | _RUN_BY_WAIT
#: as in c10d: with a single thread, small collectives in a row take up to ten times as long on busy
#: cores. With several threads, ALLGATHER_COALESCED corrupts memory: comms/gathers.py replaces it
_THREADS_PER_GROUP = 2
_DEVICE_ATTEMPTS = 5
_device_lock = threading.Lock()
#: in fdinfo of an epoll descriptor: the number and the inode of a file that is registered with it
_REGISTERED = re.compile(r"^tfd:\s+(\d+)\s.*?\bino:([0-9a-f]+)", re.MULTILINE)
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class GlooFabric(inner.Fabric):
    """The gloo device of one epoch: one listening socket, one loop thread for all groups."""

    def __init__(self, epoch: Epoch, address: str) -> None:
        self._epoch = epoch
        self._lock = threading.Lock()
        self._device: Any
        self._device, self._epoll = _create_device(address)

    def create(self, spec: GroupSpec, store: Store) -> GlooGroup:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._threads = _THREADS_PER_GROUP
        options._timeout = timedelta(seconds=self._epoch.limits.operation_timeout_seconds)
        options.global_ranks_in_group = list(spec.ranks)
        options.group_name = spec.name
        backend: Any = ProcessGroupGloo(store, spec.rank, spec.size, options)
        if spec.timeout is not None:
            backend._set_default_timeout(spec.timeout)
        plain = ProcessGroup(store, spec.rank, spec.size)
        plain._set_default_backend(ProcessGroup.BackendType.GLOO)
        for device in {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}:
            plain._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
        # torch 2.15 has no such method and counts from zero.
        if hasattr(ProcessGroup, "_set_sequence_number_for_group"):
            backend._set_sequence_number_for_group()
        return GlooGroup(spec, self._epoch, plain, backend)

    def abort(self) -> None:
        # Without free descriptors, connections stay uncut until Communicators.drain aborts again.
        with self._lock, contextlib.suppress(OSError):
            if self._device is not None:
                cut_connections(self._epoll)

    def is_quiescent(self) -> bool:
        with self._lock:
            try:
                return self._device is None or all(listens for _, listens in _sockets(self._epoll))
            except OSError:
                return False

    def close(self) -> None:
        with self._lock:
            device, self._device = self._device, None
        del device  # joins the loop thread


class GlooGroup(inner.InnerGroup):
    """A gloo communicator."""

    def __init__(self, spec: GroupSpec, epoch: Epoch, plain: Any, backend: Any) -> None:
        self.epoch = epoch
        self.description = spec.description
        self.place = spec.place
        self.size = spec.size
        limits = epoch.limits
        self._timeout = spec.timeout or timedelta(seconds=limits.operation_timeout_seconds)
        longest = timedelta(seconds=limits.long_operation_seconds)
        self._long_timeout = max(longest, spec.requested_timeout or longest)
        self._plain = plain
        self._backend = backend
        self._starts: dict[str, Callable[..., Any]] = {
            name: getattr(plain, name) for name in COMMUNICATION
        }
        self._starts["allgather"] = partial(_allgather, plain, spec.rank)
        self._starts["reduce_scatter"] = partial(_reduce_scatter, plain, spec.rank)
        for name in REPLACEMENTS.keys() & self._starts.keys():
            self._starts[name] = partial(REPLACEMENTS[name], plain)

    def forward(
        self, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dist.Work | None:
        epoch = self.epoch
        if epoch.closed:
            raise inner.EpochClosed(epoch.number, operation)
        if failpoints.ACTIVE:
            failpoints.hit("comm", op=operation, group=self.description, size=self.size)
        problem: str | None = None
        try:
            work = self._starts[operation](*args, **kwargs)
        except RuntimeError as error:
            if not communication_failed(error):
                raise
            problem = str(error)
        if problem is not None:
            epoch.fault(self.description, operation, problem)
        sequence = self.number(operation)
        tracked = operation in POINT_TO_POINT or is_asynchronous(args, kwargs)
        several = isinstance(work, SeveralWorks)
        in_thread, private = operation in _WAIT_IN_THREAD and not several, several and work.private
        writes = operation not in inner.SENDS and not private
        after = work.copy_results if private else None
        return HostWork(work, self, operation, sequence, args, in_thread, tracked, writes, after)

    def operation_counts(self) -> inner.OperationCounts:
        return inner.OperationCounts(self.collectives, self.messages)

    def backend(self) -> Any:
        return self._backend

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.epoch.check(method)
        return getattr(self._plain, method)(*args, **kwargs)

    def monitored_barrier(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        """Make the call in another thread, as it blocks in C++ and returns no Work."""
        epoch = self.epoch
        epoch.check("monitored_barrier")
        plain = self._plain
        epoch.waits[get_ident()] = Activity(self.place, "monitored_barrier")
        try:
            epoch.pool.call(lambda: plain.monitored_barrier(timeout, wait_all_ranks), epoch)
        except Abandoned:
            pass
        except RuntimeError:
            # Unless the epoch was closed, the error names the missing ranks for the caller.
            if not epoch.closed:
                raise
        finally:
            epoch.waits.pop(get_ident(), None)
        epoch.check("monitored_barrier")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.allow_long_waits(self.epoch.allows_long_waits)

    def allow_long_waits(self, allows_long_waits: bool) -> None:
        limit = max(self._timeout, self._long_timeout) if allows_long_waits else self._timeout
        self._backend._set_default_timeout(limit)

    def close(self) -> None:
        self._starts.clear()
        self._plain = self._backend = None


def _create_device(address: str) -> tuple[Any, int]:
    """Return a new device and its epoll descriptor. A lazy device hangs when a peer dies."""
    for _ in range(_DEVICE_ATTEMPTS):
        with _device_lock:
            before = set().union(*listening_epolls().values())
            device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
            made = [fd for fd, inodes in listening_epolls().items() if inodes - before]
        if len(made) == 1:
            return device, made[0]
        # Another thread has opened a server at the same time, so try again.
    raise RuntimeError(f"cannot tell the epoll descriptor of the gloo device: {made}")


def listening_epolls() -> dict[int, set[int]]:
    """Return epoll descriptors of this process -> inodes of listening sockets registered there.

    Every gloo device has such a socket. Its inode identifies the device. The number of a descriptor
    does not: it may have belonged to a freed device.
    """
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                epoll = int(entry.name)
                inodes = {os.fstat(s.fileno()).st_ino for s, listens in _sockets(epoll) if listens}
                if inodes:
                    found[epoll] = inodes
        except FileNotFoundError:
            continue
    return found


def cut_connections(epoll: int) -> None:
    """Shut down every registered connection.

    A listener is left alone: shutting it down makes gloo abort the whole process.
    """
    for connection, listening in _sockets(epoll):
        with contextlib.suppress(OSError):  # not connected yet, or closed already
            if not listening:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets(epoll: int) -> Iterator[tuple[socket.socket, bool]]:
    """Yield each TCP socket registered with ``epoll``, and whether it is a listener.

    The socket is a duplicate, which is closed before the next socket is yielded. Raises OSError for
    lack of descriptors: a socket that cannot be inspected may be connected.
    """
    try:
        listing = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except FileNotFoundError:
        return
    for number, inode in _REGISTERED.findall(listing):
        try:
            copy = os.dup(int(number))
        except OSError as error:
            if error.errno == errno.EBADF:
                continue  # closed since the listing
            raise
        # The number may belong to another file since the listing; the inode shows that.
        if os.fstat(copy).st_ino != int(inode, 16):
            os.close(copy)
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with connection:
            if connection.family in _FAMILIES and connection.type == socket.SOCK_STREAM:
                try:
                    listening = bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                except OSError:
                    continue
                yield connection, listening


def _allgather(
    plain: Any,
    rank: int,
    output_lists: Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] | torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """ProcessGroup.allgather; ``output_lists`` = [[output of each rank]], ``inputs`` = [input]."""
    outputs = output_lists[0] if output_lists else ()
    if isinstance(outputs, torch.Tensor) or _is_even(outputs):
        return plain.allgather(output_lists, inputs, *args, **kwargs)
    source = (inputs if isinstance(inputs, torch.Tensor) else inputs[0]).detach()
    buffers = [torch.empty_like(o, memory_format=torch.contiguous_format) for o in outputs]
    buffers[rank].copy_(source.reshape(buffers[rank].shape))
    works = []
    for root, buffer in enumerate(buffers):
        if buffer.numel():
            options = BroadcastOptions()
            options.rootRank = root
            works.append(plain.broadcast([buffer], options))
    return SeveralWorks(works, list(zip(outputs, buffers, strict=True)), [source])


def _reduce_scatter(
    plain: Any,
    rank: int,
    outputs: Sequence[torch.Tensor] | torch.Tensor,
    input_lists: Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """ProcessGroup.reduce_scatter; ``outputs`` = [output], ``input_lists`` = [[input of each
    rank]]."""
    inputs = input_lists[0] if input_lists else ()
    if isinstance(outputs, torch.Tensor) or isinstance(inputs, torch.Tensor) or _is_even(inputs):
        return plain.reduce_scatter(outputs, input_lists, *args, **kwargs)
    opts = kwargs.get("opts", args[0] if args else None)
    buffers = [i.clone(memory_format=torch.contiguous_format) for i in inputs]
    works = []
    for root, buffer in enumerate(buffers):
        if buffer.numel():
            options = ReduceOptions()
            options.rootRank = root
            if opts is not None:
                options.reduceOp = opts.reduceOp
            works.append(plain.reduce([buffer], options))
    result = buffers[rank].reshape(outputs[0].shape)
    return SeveralWorks(works, [(outputs[0], result)], buffers)


def _is_even(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have the same size."""
    return len({tensor.numel() for tensor in tensors}) < 2
