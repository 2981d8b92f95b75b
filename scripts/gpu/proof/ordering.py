"""Whether a wait for a future orders the current stream after the operation (C1).

Two ranks add up tensors so large that NCCL takes far longer than the host needs to continue. A read
after the wait gives the sum if the wait ordered the streams, and the old value if not.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from proof.device import Device
from proof.result import Task, first_line

_LONGEST_SECONDS = 30.0
_TIMES, _RANKS = 2, 2
_BYTES = {Device.CUDA: 256 << 20, Device.CPU: 1 << 16}
_WORK, _SEAM, _TORCHS = "Work.wait", "future of the seam", "future of torch"
_WAYS = (_WORK, _SEAM, _TORCHS)


def judge_futures(task: Task) -> dict[str, Any]:
    """Return the result of each way to wait, and note the verdict as a finding."""
    seen: dict[str, Any] = {}
    context = mp.get_context("spawn")
    seam, child_end = context.Pipe()
    until = time.monotonic() + min(_LONGEST_SECONDS, task.left_seconds - 2)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(_RANKS):
            given = (task.device, rank, folder, child_end)
            ranks.append(context.Process(target=_run_rank, args=given, daemon=True))
            ranks[-1].start()
        child_end.close()
        with suppress(EOFError):
            while len(seen) < len(_WAYS) and seam.poll(max(0.0, until - time.monotonic())):
                seen |= dict([seam.recv()])
                task.facts["futures"] = seen
                task.save()
        for process in ranks:
            process.kill()
            process.join()
    task.findings.append(f"C1: {_verdict(seen)}")
    return {"ways": seen, "bytes": _BYTES[task.device]}


def _verdict(seen: dict[str, Any]) -> str:
    """Return the verdict as a sentence."""
    seam = seen.get(_SEAM, "no answer in time")
    if not isinstance(seam, list):
        return f"futures of the seam were not judged: {seam}"
    if all(answer["least"] == answer["wanted"] for answer in seam):
        return "a wait for a future of the seam orders streams (if it was in flight: see there)"
    return "a wait for a future of the seam orders no streams: gradients of DDP race"


def _run_rank(device: Device, rank: int, folder: str, line: Connection) -> None:
    os.environ.update(device.environment(rank))
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from deadpool_megatron.comms import Communicators

    comms = Communicators(device.communicator)
    comms.install()
    dist.init_process_group("nccl", rank=rank, world_size=_RANKS)
    comms.attach(1, FileStore(f"{folder}/store", _RANKS), rank, _LONGEST_SECONDS)
    for way in _WAYS:
        try:
            found: Any = [_answer_of(way, device) for _ in range(_TIMES)]
        except Exception as error:
            found = first_line(error)
        if device is Device.CUDA:
            torch.cuda.synchronize()
        if rank == 0:
            line.send((way, found))


def _answer_of(way: str, device: Device) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    value = torch.ones(_BYTES[device] // 4, device=device.value)
    # The first use of a kernel loads it, which waits for the device: done while it is idle.
    value.min().item()
    world: Any = dist.group.WORLD
    torchs = world.inner.backend()
    is_torchs = way == _TORCHS
    work = torchs.allreduce([value]) if is_torchs else dist.all_reduce(value, async_op=True)
    (work if way == _WORK else work.get_future()).wait()
    minimum = value.min()
    # Before the value is read, which waits.
    in_flight = {"in flight": not work.is_completed()}
    return in_flight | {"least": minimum.item(), "wanted": float(_RANKS)}
