"""Part copies: what copying state to the host costs the step that runs meanwhile."""

from __future__ import annotations

import mmap
import statistics
import time
from pathlib import Path
from typing import Any

from proof.device import Device, Size
from proof.result import Findings

_WAIT_SECONDS = 60.0
_STEPS = 10
#: of the device's free memory, for what an optimizer shard would be, as far as the host has room
_SHARE = 0.25
_MOST_BYTES = 16 << 30
_REHEARSED_BYTES = 8 << 20


def measure(device: Device, size: Size, _checkout: Path | None, _out: Path) -> Findings:
    """Steps without copies (A) and with them (B) in turns, pageable and registered."""
    import torch

    from deadpool_megatron.platform.base import Platform
    from deadpool_megatron.platform.cpu import CpuPlatform
    from deadpool_megatron.platform.cuda import CudaPlatform

    found = Findings()
    platform: Platform = CudaPlatform() if device is Device.CUDA else CpuPlatform()
    where = torch.device(device.value)
    count_bytes = _bytes_to_copy(device)
    shard = torch.arange(count_bytes // 4, dtype=torch.float32, device=where)
    memory = mmap.mmap(-1, count_bytes)
    host = torch.frombuffer(memory, dtype=torch.float32)
    host.fill_(0)  # pages are there before anything is measured
    side = 8192 if device is Device.CUDA else 256
    matrix = torch.randn(side, side, device=where)
    if device is Device.CUDA:
        matrix = matrix.bfloat16()
    # A step of some seconds where the shard takes one to copy.
    work = Work(platform, matrix, 100 if device is Device.CUDA else 4)
    work.step()
    found.facts["bytes"] = count_bytes
    for name in ("pageable", "registered"):
        seconds = 0.0
        if name == "registered":
            began = time.monotonic()
            platform.register_host_memory(host)
            seconds = time.monotonic() - began
        found.facts[name] = work.turns(shard, host, size.rounds) | {"register_seconds": seconds}
        equal = bool(torch.equal(host, shard.cpu()))
        found.expect(equal, f"{name}: the copy differs from what was copied")
    platform.unregister_host_memory(host)
    return found


def _bytes_to_copy(device: Device) -> int:
    import torch

    if device is Device.CPU:
        return _REHEARSED_BYTES
    free, _ = torch.cuda.mem_get_info()
    pages = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    return min(int(_SHARE * free), pages // 4, _MOST_BYTES) & ~0xFFF


class Work:
    """Products of matrices, as training would have the device busy."""

    def __init__(self, platform: Any, matrix: Any, products: int) -> None:
        self._platform = platform
        self._matrix = matrix
        self._products = products

    def step(self) -> float:
        """Seconds until the device has done it."""
        began = time.monotonic()
        for _ in range(self._products):
            self._matrix @ self._matrix
        if not self._platform.catch_up(_WAIT_SECONDS):
            raise TimeoutError(f"a step was not over after {_WAIT_SECONDS:g} s")
        return time.monotonic() - began

    def turns(self, shard: Any, host: Any, rounds: int) -> dict[str, Any]:
        """A B A B; and the rate of a copy with nothing beside it."""
        plain: list[float] = []
        copying: list[float] = []
        enqueueing: list[float] = []
        waiting: list[float] = []
        for _ in range(rounds):
            plain += [self.step() for _ in range(_STEPS)]
            for _ in range(_STEPS):
                began = time.monotonic()
                handle = self._platform.side_copy([host], [shard])
                enqueueing.append(time.monotonic() - began)
                copying.append(enqueueing[-1] + self.step())
                began = time.monotonic()
                self._await(handle)
                waiting.append(time.monotonic() - began)
        began = time.monotonic()
        self._await(self._platform.side_copy([host], [shard]))
        alone = time.monotonic() - began
        return {
            "step_seconds": statistics.median(plain),
            "step_seconds_with_copy": statistics.median(copying),
            "ratio": statistics.median(copying) / statistics.median(plain),
            "enqueue_seconds": statistics.median(enqueueing),
            # What the fence would have waited: the part of the copy that a step does not hide.
            "left_after_step_seconds": statistics.median(waiting),
            "bytes_per_second": host.numel() * host.element_size() / alone,
        }

    def _await(self, handle: Any) -> None:
        if not handle.wait(_WAIT_SECONDS):
            raise TimeoutError(f"a copy was not over after {_WAIT_SECONDS:g} s")
