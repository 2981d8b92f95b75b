"""One rank on the package's communicators: a process that takes orders from flock.py."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from proof.device import Device
from proof.smoke import resources

CONNECT_SECONDS = 30.0


class Fate(StrEnum):
    """The way in which a rank fails when it is ordered to."""

    NONE = "none"
    DIE_IN_BATCH = "die in a batch of sends and receives"
    DIE_IN_REBUILD = "die while communicators are made"
    DEVICE_ASSERT = "device assert"


@dataclass(frozen=True)
class Setup:
    """The settings that all ranks of a flock share."""

    device: Device
    ranks: int
    spares: int
    groups: int
    folder: str
    #: whether spares have NCCL load its kernels before they are needed, as those of a run do
    warm: bool


@dataclass(frozen=True)
class Report:
    """A report of a rank: ``ready`` in an epoch, ``left`` it, or ``ruined``: to be replaced."""

    kind: str
    epoch: int
    values: Mapping[str, Any] = field(default_factory=dict)


def run_rank(setup: Setup, number: int, line: Connection) -> None:
    """Warm up, then take the role that the first order names until the process ends."""
    os.environ.update(setup.device.environment(number))
    from deadpool_megatron.support import environment as nccl_environment

    nccl_environment.complete(os.environ)
    import torch
    import torch.distributed

    if setup.device is Device.CUDA:
        torch.zeros(1, device="cuda")
    # Slow imports happen before the role is needed.
    from deadpool_megatron.comms import Communicators
    from deadpool_megatron.member.session import drain_seconds
    from deadpool_megatron.settings import Settings

    # The same limit as a member's.
    limit_seconds = drain_seconds("nccl", Settings(communicator="nccl"))
    if setup.warm:
        Communicators(setup.device.communicator).warm()
    line.send(Report("warm", -1))
    try:
        rank, epoch, way, fate = line.recv()
        Rank(setup, rank, line, way, limit_seconds).run_from(epoch, fate)
    except EOFError:
        return  # the controller has ended


class RendezvousStore:
    """A store of torch in the form of a run's; with it communicators may be made side by side."""

    def __init__(self, path: str, ranks: int) -> None:
        from torch._C._distributed_c10d import FileStore

        self._store: Any = FileStore(path, ranks)

    def set(self, _: int, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def has(self, _: int, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, _: int, keys: Sequence[str], deadline_seconds: float) -> None:
        self._store.wait(list(keys), timedelta(seconds=deadline_seconds))

    def get(self, _: int, key: str, deadline_seconds: float) -> bytes:
        self.wait(_, [key], deadline_seconds)
        return bytes(self._store.get(key))


class Rank:
    """Communicates in all groups, over and over, until its epoch is closed."""

    def __init__(
        self, setup: Setup, rank: int, line: Connection, way: str, limit_seconds: float
    ) -> None:
        import torch
        import torch.distributed as dist

        from deadpool_megatron.comms import Communicators, Limits

        self._setup, self._rank, self._line = setup, rank, line
        self._limit_seconds = limit_seconds
        self._comms = Communicators(
            setup.device.communicator, Limits(drain_seconds=limit_seconds), rebuild=way
        )
        self._where = torch.device(setup.device.value)
        self._fate = Fate.NONE
        self._interrupt_seconds = 0.0
        self._comms.install()
        dist.init_process_group("nccl", rank=rank, world_size=setup.ranks)
        self._groups: list[tuple[list[int], Any]] = [(list(range(setup.ranks)), dist.group.WORLD)]
        while len(self._groups) < setup.groups:
            # In turns all ranks, all but a single rank, and two neighbours.
            index = len(self._groups)
            ranks = list(range(setup.ranks))
            if index % 3 == 1:
                ranks.remove(index % setup.ranks)
            elif index % 3 == 2:
                ranks = sorted({index % setup.ranks, (index + 1) % setup.ranks})
            self._groups.append((ranks, dist.new_group(ranks)))
        threading.Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        """Carry out orders while the rank communicates: a fate, or the number of a closed epoch
        with the way in which the next communicators are made."""
        while True:
            try:
                order = self._line.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(order, Fate):
                self._fate = order
                continue
            began = time.monotonic()
            closed, self._comms.rebuild = order
            self._comms.interrupt(closed)
            self._interrupt_seconds = time.monotonic() - began

    def run_from(self, epoch: int, fate: Fate) -> None:
        """Enter this epoch and its successors; return when the process cannot enter another."""
        from deadpool_megatron.comms import CommunicatorFault, EpochClosed
        from deadpool_megatron.comms.store import EpochStore

        while True:
            try:
                if fate is Fate.DIE_IN_REBUILD:
                    os.kill(os.getpid(), signal.SIGKILL)
                began = time.monotonic()
                path = f"{self._setup.folder}/{epoch}"
                rendezvous = RendezvousStore(path, self._setup.ranks)
                store = EpochStore(rendezvous, epoch, CONNECT_SECONDS)
                self._comms.attach(epoch, store, self._rank, CONNECT_SECONDS)
                attached = time.monotonic()
                self._exchange()
                first_use = time.monotonic() - attached
                took = {"attach_seconds": attached - began, "first_use_seconds": first_use}
                self._report("ready", epoch, **took, **self._resources())
                while True:
                    self._exchange()
            except (EpochClosed, CommunicatorFault) as error:
                if not self._leave(epoch, error):
                    return
                epoch += 1
            except (RuntimeError, IndexError) as error:
                self._report("ruined", epoch, reason=str(error).splitlines()[0])
                return

    def _leave(self, epoch: int, error: Exception) -> bool:
        """Drain, and report how long that took; False: this process must be replaced."""
        from deadpool_megatron.comms import EpochClosed
        from deadpool_megatron.platform.cuda import CudaPlatform

        if not isinstance(error, EpochClosed):
            self._report("ruined", epoch, reason=str(error))
            return False
        began = time.monotonic()
        reason = "" if self._comms.drain() else self._comms.unusable_reason or "it did not drain"
        drained = time.monotonic()
        try:
            if not reason and self._setup.device is Device.CUDA:
                CudaPlatform().synchronize(self._limit_seconds)
        except (RuntimeError, TimeoutError) as problem:
            reason = str(problem).partition("\n")[0]
        if reason:
            self._report("ruined", epoch, reason=reason)
            return False
        took = {"abort_seconds": self._interrupt_seconds, "drain_seconds": drained - began}
        self._report("left", epoch, **took, device_seconds=time.monotonic() - drained)
        return True

    def _exchange(self) -> None:
        """Add up in every group and pass messages in a ring. Raises RuntimeError if it is wrong."""
        import torch
        import torch.distributed as dist

        for ranks, group in self._groups:
            if self._rank in ranks:
                value = torch.full((1 << 12,), float(self._rank + 1), device=self._where)
                dist.all_reduce(value, group=group)
                found, wanted = value[-1].item(), float(sum(ranks) + len(ranks))
                self._comms.finish_iteration()  # raises if an abort has left junk
                if found != wanted:
                    raise RuntimeError(f"wrong sum: {found} instead of {wanted}")
        if self._fate is Fate.DEVICE_ASSERT:
            # An index out of bounds is an assert of a kernel, which ruins the context.
            torch.zeros(4, device=self._where)[torch.tensor([9], device=self._where)].sum().item()
        if self._fate is Fate.DIE_IN_BATCH:
            _die_in_the_next_send(self._setup.folder)
        after, before = (self._rank + 1) % self._setup.ranks, (self._rank - 1) % self._setup.ranks
        sent = torch.full((1 << 12,), float(self._rank), device=self._where)
        received = torch.empty_like(sent)
        batch = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        value_received = received[-1].item()
        self._comms.finish_iteration()
        if value_received != float(before):
            raise RuntimeError(f"wrong message: {value_received} instead of {before}")

    def _resources(self) -> dict[str, int]:
        from deadpool_megatron.comms.nccl import is_group_open

        return {
            **resources(self._setup.device is Device.CUDA),
            "reaping": self._comms.reaping,
            "communicators": sum(self._rank in ranks for ranks, _ in self._groups),
            "group left open": is_group_open(),
        }

    def _report(self, kind: str, epoch: int, **values: Any) -> None:
        self._line.send(Report(kind, epoch, values))


def _die_in_the_next_send(folder: str) -> None:
    """Have the next send kill this process at its fault point, while the batch's block is open."""
    from deadpool_megatron import failpoints

    fault = {"id": f"batch-{os.getpid()}", "point": "comm", "match": {"op": "send"}}
    plan = Path(folder, f"{os.getpid()}.faults")
    plan.write_text(json.dumps([{**fault, "action": "signal", "target": "self", "signal": "KILL"}]))
    failpoints.load(plan)
