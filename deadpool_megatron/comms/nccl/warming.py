"""What NCCL loads once in each process, loaded before a recovery has to wait for it.

To make a communicator has NCCL look at each of its kernels, which loads them; torch loads its own
at the first use of an operation. A group of one rank needs no peer for that. It cannot do more:
with one rank NCCL copies instead, and opens no connection. Has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from deadpool_megatron.comms.in_flight.epoch import Epoch, Limits, Progress
from deadpool_megatron.comms.in_flight.waiters import WaiterPool
from deadpool_megatron.comms.inner import GroupSpec
from deadpool_megatron.comms.nccl.fabric import NcclFabric

_ELEMENTS = 256
_SECONDS = 60.0
_DTYPES = (torch.float32, torch.bfloat16)


def warm(device: torch.device, make: Callable[[Epoch], NcclFabric] = NcclFabric) -> None:
    """Make a communicator of one rank, use it once for each collective of training, and abort it.

    The calling thread must not be in an epoch. Raises RuntimeError as NCCL does.
    """
    limits = Limits(_SECONDS, 0.0, _SECONDS, 0.0)
    epoch = Epoch(0, limits, WaiterPool(), Progress(), None)
    fabric = make(epoch)
    epoch.fabrics.append(fabric)
    spec = GroupSpec(
        "warm-up",
        "deadpool-warm-up",
        (0,),
        0,
        device,
        requested_timeout=timedelta(seconds=_SECONDS),
    )
    try:
        group = fabric.create(spec, HashStore())
        for operation, args in _operations(device):
            work = group.forward(operation, args, {})
            if work is not None:
                work.wait()  # the barrier, which is the last one, holds the host
    finally:
        epoch.close()
        fabric.close()


def _operations(device: torch.device) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in _DTYPES:
        one, other = (torch.zeros(_ELEMENTS, dtype=dtype, device=device) for _ in range(2))
        yield "allreduce", ([one],)
        yield "broadcast", ([one],)
        yield "_allgather_base", (other, one)
        yield "_reduce_scatter_base", (other, one)
        yield "alltoall_base", (other, one, [], [])
    yield "barrier", ()
