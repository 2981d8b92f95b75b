"""The device under the training process: CUDA, or a CPU on which Megatron can run as well.

``devices`` has the interface of a device, and the CPU; ``cuda`` has NVIDIA GPUs.
"""

from __future__ import annotations

import functools

import torch

from deadpool_megatron.platform.cuda import CudaPlatform
from deadpool_megatron.platform.devices import CopyFailedError, CpuPlatform, PinnedSlots, Platform

__all__ = ["CopyFailedError", "PinnedSlots", "Platform", "select_platform"]


@functools.cache
def select_platform() -> Platform:
    """Return the platform of this process: CUDA if a device is usable, else the CPU.

    The call uses the driver, so a process that forks training processes must not make it on a
    machine with GPUs.
    """
    return CudaPlatform() if torch.cuda.is_available() else CpuPlatform()
