"""The device under the training process: CUDA, or a CPU on which Megatron can run as well.

devices  the seam, copies during training, and the CPU
cuda     NVIDIA GPUs
"""

from __future__ import annotations

import functools

import torch

from deadpool_megatron.platform.cuda import CudaPlatform
from deadpool_megatron.platform.devices import CopyFailedError, CpuPlatform, PinnedSlots, Platform

__all__ = ["CopyFailedError", "PinnedSlots", "Platform", "select_platform"]


@functools.cache
def select_platform() -> Platform:
    """Return the platform of this process: CUDA when a device is usable, else the CPU.

    Touches the driver: a process that means to fork training processes must not call it on a GPU
    machine.
    """
    return CudaPlatform() if torch.cuda.is_available() else CpuPlatform()
