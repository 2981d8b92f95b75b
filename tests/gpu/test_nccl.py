"""Real NCCL under the seam: connect, lose a rank, abort, connect again around its replacement.

Runs where a CUDA device is found; one is enough: a host identity per process makes NCCL take the
ranks for different hosts (socket transport on loopback), which is slow but real.
"""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import os
import signal
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from deadpool_megatron import nccl_environment
from tests import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SIZE = 2
DEADLINE_SECONDS = 120.0


def play(rank: int, epoch: int, folder: str, orders: Connection) -> None:
    """One rank: reduce until told of the close of an epoch, then enter the next."""
    gpus.show()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(SIZE),
        NCCL_HOSTID=f"host-{rank}-{epoch}",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_SOCKET_IFNAME="lo",
    )
    nccl_environment.complete(os.environ)
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from deadpool_megatron.comms import Communicators, EpochClosed
    from deadpool_megatron.hooks.process.session import drain_seconds
    from deadpool_megatron.platform.cuda import CudaPlatform
    from deadpool_megatron.settings import NCCL_DEFAULTS, Settings

    torch.cuda.set_device(rank % torch.cuda.device_count())
    # The limit that a member has.
    limit = drain_seconds("nccl", dataclasses.replace(Settings(), **NCCL_DEFAULTS))
    communicators = Communicators("nccl", close_wait_seconds=30.0, drain_seconds=limit)
    platform = CudaPlatform()
    communicators.install()
    dist.init_process_group()

    def watch() -> None:
        while True:
            communicators.interrupt(orders.recv())

    threading.Thread(target=watch, daemon=True).start()
    while True:
        store = FileStore(f"{folder}/{epoch}", SIZE)
        communicators.attach(epoch, store, rank, deadline_seconds=60.0)
        try:
            while True:
                value = torch.full((1 << 20,), float(rank + 1), device="cuda")
                dist.all_reduce(value)
                orders.send((epoch, value[0].item()))
        except EpochClosed:
            assert communicators.drain(), communicators.ruin
            platform.synchronize(limit)
            epoch += 1


def await_sum(link: Connection, epoch: int) -> None:
    """Until the rank reports the right sum of that epoch; older reports may come first."""
    while True:
        assert link.poll(DEADLINE_SECONDS), f"no result of epoch {epoch}"
        found, value = link.recv()
        if found == epoch:
            assert value == 3.0
            return


def test_survivor_goes_on_around_a_replacement() -> None:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []

        def start(rank: int, epoch: int) -> tuple[mp.process.BaseProcess, Connection]:
            ours, theirs = context.Pipe()
            process = context.Process(target=play, args=(rank, epoch, folder, theirs), daemon=True)
            process.start()
            started.append(process)
            return process, ours

        try:
            _, survivor = start(0, 1)
            victim, _ = start(1, 1)
            await_sum(survivor, 1)
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            survivor.send(1)
            start(1, 2)
            await_sum(survivor, 2)
            assert Path(folder, "2").exists()
        finally:
            for process in started:
                process.kill()
                process.join(10)
