"""The device of a member and its communicator, chosen before anything uses a device.

Code that asks for "the current device" after the choice gets the member's own. Before the choice it
would get the first device, in all members of a node.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from deadpool_megatron import arguments
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.preflight.host import GPU_VARIABLE
from deadpool_megatron.support import environment as nccl_environment


def select_device(communicator: str, local_rank: int) -> str:
    """Make the GPU that the agent shows this member, if any, the current device.

    Returns the kind of communicator, which is the same for all members of the run: "gloo", "nccl"
    or the path of a test communicator. Ends the process, with one line, where NCCL could not
    recover or has no GPU for this member: that is a fault of the host.
    """
    if communicator != "nccl":
        _end_if(arguments.stand_in_problem(communicator), ExitStatus.BAD_INPUT)
        if torch.cuda.is_available():
            # With gloo, members may share a GPU.
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        # "auto" becomes "nccl" when a run is made on a host with GPUs.
        return "gloo" if communicator == "auto" else communicator
    _end_if(nccl_environment.error_message(os.environ), ExitStatus.BAD_INPUT)
    _end_if(_select_gpu(), ExitStatus.NO_DEVICE)
    version = _nccl_version()
    _end_if(nccl_environment.version_error(version), ExitStatus.BAD_INPUT)
    for line in nccl_environment.warnings(os.environ):
        print(f"deadpool: {line}", file=sys.stderr, flush=True)
    print(
        f"deadpool: GPU {os.environ.get(GPU_VARIABLE, '0')}, NCCL {'.'.join(map(str, version))},"
        f" {nccl_environment.in_effect(os.environ)}",
        file=sys.stderr,
        flush=True,
    )
    return communicator


def _select_gpu() -> str:
    """Make the GPU of this member the current device. Return torch's reason if there is none."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(0)
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without CUDA
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"no GPU for this process ({GPU_VARIABLE}={os.environ.get(GPU_VARIABLE)}): {reason}"
    return ""


def _end_if(problem: str, status: int) -> None:
    if problem:
        print(f"deadpool: {problem}", file=sys.stderr, flush=True)
        sys.exit(status)


def _nccl_version() -> tuple[int, int, int]:
    """Return the version of the loaded library, which can differ from that of torch's build."""
    backend = getattr(dist, "ProcessGroupNCCL", None)
    loaded = getattr(backend, "get_runtime_nccl_version", torch.cuda.nccl.version)
    major, minor, patch = loaded()[:3]
    return int(major), int(minor), int(patch)
