"""The device of a member, and a look at what NCCL needs there, before anything uses either.

What is asked of "the current device" afterwards (the memory next to it, the groups on it) is asked
of the member's own. Until a device is set that is the first one, for all members of a node.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from deadpool_megatron import arguments, nccl_environment

# As for any bad input: another process would find the same.
EXIT_BAD_INPUT = 2


def take_device(communicator: str, slot: int) -> str:
    """Make GPU number ``slot`` of the visible ones the current device, if there are any; returns
    "gloo", "nccl" or what plays it, for ``communicator`` may be "auto".

    Ends the process, with one line, where NCCL could not recover, or has no GPU for this member.
    """
    kind, has_gpu = communicator, torch.cuda.is_available()
    if kind == "auto":
        kind = "nccl" if nccl_environment.will_be_nccl(kind, has_gpu=has_gpu) else "gloo"
    gpus = torch.cuda.device_count() if has_gpu else 0
    problem = nccl_problem(slot, gpus) if kind == "nccl" else arguments.played_problem(kind)
    if problem:
        print(f"deadpool: {problem}", file=sys.stderr, flush=True)
        sys.exit(EXIT_BAD_INPUT)
    if has_gpu:
        # With gloo, members may share a GPU.
        torch.cuda.set_device(slot % gpus)
    if kind == "nccl":
        for line in nccl_environment.warnings(os.environ):
            print(f"deadpool: {line}", file=sys.stderr, flush=True)
        print(
            f"deadpool: GPU {slot} of {gpus}, NCCL {'.'.join(map(str, _nccl_version()))},"
            f" {nccl_environment.in_force(os.environ)}",
            file=sys.stderr,
            flush=True,
        )
    return kind


def nccl_problem(slot: int, gpus: int) -> str:
    """Returns one line on why this member cannot use NCCL; empty if it can."""
    if slot >= gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        return (
            f"NCCL needs a GPU for each process of a node, and process {slot} sees {gpus}{seen}:"
            " start fewer with --nproc-per-node, or give --deadpool-communicator gloo"
        )
    return nccl_environment.complaint(os.environ) or nccl_environment.version_complaint(
        _nccl_version()
    )


def _nccl_version() -> tuple[int, int, int]:
    """Of the library that is loaded, which need not be the one that torch was built with."""
    backend = getattr(dist, "ProcessGroupNCCL", None)
    loaded = getattr(backend, "get_runtime_nccl_version", torch.cuda.nccl.version)
    major, minor, patch = loaded()[:3]
    return int(major), int(minor), int(patch)
