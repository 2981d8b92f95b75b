"""What a role computes on, as one number: only where it is equal are equal bytes to be expected.

Another model of GPU or CPU, another driver or another number of threads may have a library choose
other kernels, which add in another order and are as right.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

_CPU_FACTS = Path("/proc/cpuinfo")
_GPU_DRIVER = Path("/proc/driver/nvidia/version")


def hardware(device: torch.device) -> int:
    """Equal for roles with the same devices, drivers and libraries; less than 2**56."""
    facts = [
        platform.machine(),
        _line(_CPU_FACTS, "model name"),
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        torch.__version__,
    ]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        facts += [name, f"{major}.{minor}", str(torch.version.cuda), _line(_GPU_DRIVER, "NVRM")]
        facts.append(str(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _line(file: Path, begin: str) -> str:
    """The first line of a file of the kernel that begins so; empty where there is none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(begin)), "")
