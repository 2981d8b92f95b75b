"""Part smoke: each requirement of the GPU path alone, and what torch's futures wait for.

A probe that raises is a problem; the following probes run nevertheless.
"""

from __future__ import annotations

import os
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proof.ordering import judge_futures
from proof.result import Task, first_line
from proof.slots import slot_of

_WARM_UPS, _WARM_UP_SHARE = 30, 0.2
_REHEARSED_BYTES, _SLOT_BYTES = 8 << 20, 1 << 30


def probe(task: Task) -> None:
    """Run all probes; a later probe may depend on an earlier."""
    probes: dict[str, Callable[[Task], dict[str, Any]]] = {
        "versions": _versions,
        "take_device": _take_device,
        "warm": _warm,
        "own_stream": _own_stream,
        "slot": _slot,
        "group_depth": _group_depth,
        "futures": judge_futures,
    }
    for name, run in probes.items():
        began = time.monotonic()
        try:
            fact = run(task)
        except (Exception, SystemExit) as error:
            task.problems.append(f"{name}: {first_line(error)}")
            fact = {"raised": traceback.format_exc().splitlines()[-8:]}
        task.facts[name] = {**fact, "seconds": round(time.monotonic() - began, 3)}
        task.save()


def _versions(task: Task) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.__version__}
    if not task.is_on_gpu:
        return found
    from torch.distributed import ProcessGroupNCCL

    asked: dict[str, Callable[[], Any]] = {
        "cuda": lambda: torch.version.cuda,
        "nccl_built": lambda: torch.cuda.nccl.version(),  # type: ignore[no-untyped-call]
        "nccl_loaded": lambda: ProcessGroupNCCL.get_runtime_nccl_version(),  # type: ignore
        "nccl_library": lambda: subprocess.getoutput(f"grep -m1 libnccl /proc/{os.getpid()}/maps"),
        "gpu": lambda: str(torch.cuda.get_device_properties(0)),
        "memory": lambda: torch.cuda.mem_get_info(),
        "driver": lambda: subprocess.getoutput("timeout 10 nvidia-smi -q | grep Driver.Version"),
    }
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except Exception as error:
            found[name] = first_line(error)
    return found


def _take_device(task: Task) -> dict[str, Any]:
    """Select the device, whose line is in the part's log."""
    from deadpool_megatron.member.member_device import select_device

    return {"kind": select_device(task.device.communicator if task.is_on_gpu else "auto", 0)}


def _warm(task: Task) -> dict[str, Any]:
    """Make, use and abort a communicator of one rank, over and over."""
    import torch

    from deadpool_megatron.comms.communicators import fabric_of
    from deadpool_megatron.comms.nccl import warm

    device = torch.device("cuda", 0) if task.is_on_gpu else torch.device("cpu")
    seconds: list[float] = []
    until = time.monotonic() + _WARM_UP_SHARE * task.left_seconds
    while len(seconds) < _WARM_UPS and (not seconds or time.monotonic() < until):
        began = time.monotonic()
        warm(device, lambda epoch: fabric_of(epoch, task.device.communicator, "127.0.0.1"))
        seconds.append(time.monotonic() - began)
        # Saved each time, so that a hang leaves the earlier results.
        facts = task.facts.setdefault("warm", {"held_after_first": resources(task.is_on_gpu)})
        facts["seconds of each"] = seconds
        task.save()
    return {**task.facts["warm"], "held_at_end": resources(task.is_on_gpu)}


def resources(is_on_gpu: bool) -> dict[str, int]:
    """Return the resources of this process, and the GPU memory that all processes use."""
    found = {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }
    if is_on_gpu:
        import torch

        free, total = torch.cuda.mem_get_info()
        found["device_bytes"] = total - free
    return found


def _own_stream(task: Task) -> dict[str, Any]:
    if not task.is_on_gpu:
        return {"left out": "there is one on a GPU only"}
    import torch

    from deadpool_megatron.platform import cuda

    stream = cuda._own_stream(torch.cuda.current_device())
    with torch.cuda.stream(stream):
        total = torch.ones(1 << 20, device="cuda").sum()
    stream.synchronize()
    return {"kind": type(stream).__name__, "sum": total.item()}


def _slot(task: Task) -> dict[str, Any]:
    """Copy into a registered segment and back."""
    import torch

    count = (_SLOT_BYTES if task.is_on_gpu else _REHEARSED_BYTES) // 4
    state = torch.arange(count, dtype=torch.int32, device=task.device.value)
    wanted = state.sum().item()
    with slot_of([state]) as (slot, register_seconds):
        slot.capture()
        state.zero_()
        slot.put_back()
        slot.platform.synchronize(10.0)
    task.expect(state.sum().item() == wanted, "slot: other bytes came back")
    return {"bytes": 4 * count, "register_seconds": register_seconds}


def _group_depth(task: Task) -> dict[str, Any]:
    """Ask NCCL whether the probes left a group open in this thread."""
    from deadpool_megatron.comms import nccl as blocks

    is_open = blocks.is_group_open()
    task.expect(not is_open, "a group of NCCL was left open")
    return {"left open": is_open, "asked": blocks._group_end() is not None}
