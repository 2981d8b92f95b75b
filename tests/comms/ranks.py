"""Forks ranks out of the test process: real processes and sockets, one import of torch.

A test gives a function to run in each rank; it gets a :class:`Member`. The store is a process of
its own, so that it can be killed. A watcher thread in each rank carries out what the test sends,
as an agent's orders would arrive.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deadpool_megatron.comms import Communicators, Limits
from tests.common.wait import wait_for

DEADLINE_SECONDS = 60.0


@dataclass
class Member:
    """A rank, as its function uses it."""

    rank: int
    size: int
    port: int
    channel: Connection
    settings: dict[str, Any]
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    interrupted_at: float = 0.0
    orders: dict[str, threading.Event] = field(default_factory=dict)
    client: dist.Store | None = None

    def __post_init__(self) -> None:
        given = {"operation_timeout_seconds": 20.0, "close_wait_seconds": 10.0, **self.settings}
        limits = {name: given.pop(name) for name in [*given] if name.endswith("_seconds")}
        self.comms = Communicators(
            limits=Limits(**limits), on_fault=lambda *fault: self.faults.append(fault), **given
        )
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def init(self, backend: str = "gloo", epoch: int | None = None) -> None:
        """Install the seam and make WORLD, detached; then attach in ``epoch``."""
        self.comms.install()
        dist.init_process_group(backend, rank=self.rank, world_size=self.size)
        if epoch is not None:
            self.attach(epoch)

    def store(self) -> dist.Store:
        """A new client of the store."""
        return dist.TCPStore(
            "127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=DEADLINE_SECONDS)
        )

    def attach(self, epoch: int, deadline_seconds: float = 30.0) -> None:
        """Attach as this rank. The client is used again: making one sometimes takes 5 s."""
        if self.client is None:
            self.client = self.store()
        client, self.client = self.client, None
        self.comms.attach(epoch, client, self.rank, deadline_seconds)
        self.client = client

    @property
    def epoch(self) -> Any:
        """The epoch that the communicators are attached to or are attaching to, if any."""
        return self.comms._newest

    def computes_in(self, epoch: int) -> bool:
        """Attach in ``epoch``; the sum over all ranks is what it should be."""
        self.attach(epoch)
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item() == self.size

    def send(self, message: Any) -> None:
        """Send a message to the test."""
        with self._lock:
            self.channel.send(message)

    def order(self, name: str) -> threading.Event:
        """Set when the test sent ("order", name)."""
        return self.orders.setdefault(name, threading.Event())

    def _watch(self) -> None:
        while (order := _received(self.channel)) is not None:
            if order[0] == "interrupt":
                self.interrupted_at = time.monotonic()
                self.comms.interrupt(order[1])
            elif order[0] == "order":
                self.order(order[1]).set()
            elif order[0] == "ask":
                self.send(("answer", getattr(self.comms, order[1])()))
            elif order[0] == "held up":
                self.send(("answer", bool(self.comms.waiting_for() or self.faults)))


def kind(work: Any) -> Any:
    """The type of operation that torch has noted of its own work."""
    return work._get_op_type()


def backend(group: Any) -> Any:
    """The backend of torch's in a group."""
    return group._get_backend(torch.device("cpu"))


class Ranks:
    """The test's side. Use as a context manager; kills what is left."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.size = size
        self.settings = settings
        self.pids: dict[int, int] = {}
        self.channels: dict[int, Connection] = {}
        self.store_pid, self.port = _start_store()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.pids.values(), self.store_pid]:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for channel in self.channels.values():
            channel.close()

    def start(self, function: Callable[..., Any], *args: Any, ranks: Any = None) -> Ranks:
        """Fork ``ranks`` (default: all) and run ``function(member, *args)`` in each."""
        for rank in range(self.size) if ranks is None else ranks:
            own_end, far_end = Pipe()
            pid = os.fork()
            if pid == 0:
                for channel in [own_end, *self.channels.values()]:
                    channel.close()
                self._run(rank, far_end, function, args)
            far_end.close()
            self.pids[rank], self.channels[rank] = pid, own_end
        return self

    def _run(self, rank: int, channel: Connection, function: Callable[..., Any], args: Any) -> None:
        code = 1
        try:
            sys.stdout = sys.stderr
            # This rank must not collect the objects of the test process.
            gc.freeze()
            # Nor are the threads that its tests have computed with: a fork does not have them.
            torch.set_num_threads(1)
            member = Member(rank, self.size, self.port, channel, self.settings)
            result = function(member, *args)
            member.send(("result", result))
            code = 0
        except BaseException:
            with contextlib.suppress(OSError):
                member.send(("error", traceback.format_exc()))
        finally:
            os._exit(code)

    def send(self, rank: int, *order: Any) -> None:
        self.channels[rank].send(order)

    def interrupt(self, epoch: int, ranks: Any = None) -> None:
        for rank in self.pids if ranks is None else ranks:
            self.send(rank, "interrupt", epoch)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)
        if number == signal.SIGKILL:
            os.waitpid(self.pids.pop(rank), 0)
            self.channels.pop(rank).close()

    def receive(self, rank: int, kind: str, seconds: float = DEADLINE_SECONDS) -> Any:
        """Return the value of the next message of ``rank``, which must be (kind, value)."""
        assert self.channels[rank].poll(seconds), f"rank {rank} is silent for {seconds:g} s"
        message = _received(self.channels[rank])
        assert message is not None, f"rank {rank} died"
        assert message[0] == kind, f"rank {rank}: {message[0]}: {message[1]}"
        return message[1]

    def until_all(self, kind: str = "ready") -> None:
        """Wait until each rank has sent such a message."""
        for rank in self.pids:
            self.receive(rank, kind)

    def order_all(self, name: str) -> None:
        for rank in self.pids:
            self.send(rank, "order", name)

    def ask(self, rank: int, *question: str) -> Any:
        """Return the answer of ``rank``, of its communicators or whether it is held up."""
        self.send(rank, *question)
        return self.receive(rank, "answer")

    def until_held_up(self, *ranks: int) -> None:
        """Wait until each of these ranks is in an operation, or in a failed operation."""
        for rank in ranks:
            wait_for(f"rank {rank} to be held up", partial(self.ask, rank, "held up"))

    def results(self, seconds: float = DEADLINE_SECONDS) -> dict[int, Any]:
        """Return the results of all living ranks; errors of all of them are shown together."""
        messages: dict[int, Any] = {}
        for rank in sorted(self.pids):
            # Others may wait for the failed rank.
            has_failed = any(not m or m[0] != "result" for m in messages.values())
            has_message = self.channels[rank].poll(min(seconds, 2.0) if has_failed else seconds)
            messages[rank] = _received(self.channels[rank]) if has_message else ("silent", seconds)
        errors = [f"rank {r}: {m}" for r, m in messages.items() if not m or m[0] != "result"]
        assert not errors, "\n".join(errors).replace("\\n", "\n")
        return {rank: message[1] for rank, message in messages.items()}

    def kill_store(self) -> None:
        os.kill(self.store_pid, signal.SIGKILL)
        os.waitpid(self.store_pid, 0)

    def go_without_store(self, function: Callable[..., Any]) -> dict[int, Any]:
        """Run it in all ranks; between its "ready" and the order "go" the store dies."""
        self.start(function).until_all()
        self.kill_store()
        self.order_all("go")
        return self.results()


def run(size: int, function: Callable[..., Any], *args: Any, **settings: Any) -> dict[int, Any]:
    """Run ``function`` in ``size`` ranks to its end; returns its results by rank."""
    with Ranks(size, **settings) as ranks:
        return ranks.start(function, *args).results()


@contextlib.contextmanager
def plain_gloo(member: Member, name: str = "plain") -> Iterator[None]:
    """torch.distributed as it is, for comparison."""
    store = dist.PrefixStore(name, member.store())
    dist.init_process_group("gloo", store=store, rank=member.rank, world_size=member.size)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def usage() -> dict[str, int]:
    """File descriptors, threads and resident KiB of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "kib": resident,
    }


def _start_store() -> tuple[int, int]:
    reader, writer = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            writer.send(store.port)
            while os.getppid() != 1:
                time.sleep(0.5)
        finally:
            os._exit(0)
    writer.close()
    with reader:
        return pid, reader.recv()


def _received(channel: Connection) -> Any:
    """Return the next message; None at the end of the other side."""
    try:
        return channel.recv()
    except (EOFError, ConnectionError):
        return None
