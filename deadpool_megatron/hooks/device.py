"""The device of a member, and a look at what NCCL needs there, before anything uses either.

What is asked of "the current device" afterwards (the memory next to it, the groups on it) is asked
of the member's own. Until a device is set that is the first one, for all members of a node.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from deadpool_megatron import arguments
from deadpool_megatron.cluster.failures import ExitStatus
from deadpool_megatron.preflight.host import VISIBLE
from deadpool_megatron.support import environment as nccl_environment


def take_device(communicator: str, slot: int) -> str:
    """Make the GPU that the agent shows this member the current device, if there is one; returns
    "gloo", "nccl" or what plays it, as ``communicator`` says for all members of the run.

    Ends the process, with one line, where NCCL could not recover, or has no GPU for this member:
    that is the host's fault, and no other member trains with something else for it.
    """
    if communicator != "nccl":
        _end_if(arguments.played_problem(communicator), ExitStatus.BAD_INPUT)
        if torch.cuda.is_available():
            # With gloo, members may share a GPU.
            torch.cuda.set_device(slot % torch.cuda.device_count())
        # Where a run was made and nobody has chosen, no GPU was to be seen.
        return "gloo" if communicator == "auto" else communicator
    _end_if(nccl_environment.complaint(os.environ), ExitStatus.BAD_INPUT)
    _end_if(_take_gpu(), ExitStatus.NO_DEVICE)
    version = _nccl_version()
    _end_if(nccl_environment.version_complaint(version), ExitStatus.BAD_INPUT)
    for line in nccl_environment.warnings(os.environ):
        print(f"deadpool: {line}", file=sys.stderr, flush=True)
    print(
        f"deadpool: GPU {os.environ.get(VISIBLE, '0')}, NCCL {'.'.join(map(str, version))},"
        f" {nccl_environment.in_force(os.environ)}",
        file=sys.stderr,
        flush=True,
    )
    return communicator


def _take_gpu() -> str:
    """Returns why there is no GPU for this member, as torch says it; empty once it is taken."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(0)
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without CUDA
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return f"no GPU for this process ({VISIBLE}={os.environ.get(VISIBLE)}): {why}"
    return ""


def _end_if(problem: str, status: int) -> None:
    if problem:
        print(f"deadpool: {problem}", file=sys.stderr, flush=True)
        sys.exit(status)


def _nccl_version() -> tuple[int, int, int]:
    """Of the library that is loaded, which need not be the one that torch was built with."""
    backend = getattr(dist, "ProcessGroupNCCL", None)
    loaded = getattr(backend, "get_runtime_nccl_version", torch.cuda.nccl.version)
    major, minor, patch = loaded()[:3]
    return int(major), int(minor), int(patch)
