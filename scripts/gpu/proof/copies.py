"""Part copies: the cost for a step of a concurrent copy into page-locked shared memory."""

from __future__ import annotations

import math
import shutil
import statistics
import time

from proof.result import Task
from proof.slots import slot_of

_WAIT_SECONDS = 60.0
_STEPS, _MAX_ROUNDS = 10, 3
_MAX_BYTES, _REHEARSED_BYTES = 4 << 30, 8 << 20
#: seconds of a step for each second of a copy, as in training at the least
_STEP_SHARE = 2.0


def measure(task: Task) -> None:
    """Steps without copies (A) and with them (B) in turns."""
    import torch

    where = task.device.value
    shard = torch.arange(_bytes_to_copy(task) // 4, dtype=torch.float32, device=where)
    side, dtype = (8192, torch.bfloat16) if task.is_on_gpu else (256, torch.float32)
    matrix = torch.randn(side, side, device=where).to(dtype)
    with slot_of([shard]) as (slot, register_seconds):

        def copy() -> float:
            began = time.monotonic()
            assert slot.start_copy().wait(_WAIT_SECONDS), "a copy has not ended"
            return time.monotonic() - began

        def step(products: int) -> float:
            """Products of matrices, as training would have the device busy."""
            began = time.monotonic()
            for _ in range(products):
                matrix @ matrix
            assert slot.platform.catch_up(_WAIT_SECONDS), "a step has not ended"
            return time.monotonic() - began

        alone = min(copy() for _ in range(3))
        products = math.ceil(_STEP_SHARE * alone / (min(step(20) for _ in range(3)) / 20))
        nbytes = shard.numel() * shard.element_size()
        task.facts |= {"bytes": nbytes, "bytes_per_second": nbytes / alone, "products": products}
        task.facts["register_seconds"] = register_seconds
        task.save()
        seen: dict[str, list[float]] = {}
        for _ in range(_MAX_ROUNDS):
            began = time.monotonic()
            seen.setdefault("step_seconds", []).extend(step(products) for _ in range(_STEPS))
            for _ in range(_STEPS):
                at = [time.monotonic()]
                handle = slot.start_copy()
                at.append(time.monotonic())
                step(products)
                at.append(time.monotonic())
                assert handle.wait(_WAIT_SECONDS), "a copy has not ended"
                at.append(time.monotonic())
                seen.setdefault("enqueue_seconds", []).append(at[1] - at[0])
                seen.setdefault("step_seconds_with_copy", []).append(at[2] - at[0])
                # The fence would wait for this: the part of a copy that a step does not hide.
                seen.setdefault("left_after_step_seconds", []).append(at[3] - at[2])
            task.facts |= {name: statistics.median(values) for name, values in seen.items()}
            task.save()
            if task.left_seconds < 2 * (time.monotonic() - began):
                break
        ratio = task.facts["step_seconds_with_copy"] / task.facts["step_seconds"]
        task.facts |= {"ratio": ratio, "steps": len(seen["step_seconds"])}
        task.findings.append(
            f"steps of {task.facts['step_seconds']:.3f} s with a copy of {nbytes >> 20} MiB beside"
            f" them take {ratio:.3f} times as long; alone it takes {alone:.3f} s"
        )
        copied = torch.frombuffer(slot.bytes, dtype=torch.float32)[: shard.numel()]
        task.expect(bool(torch.equal(copied, shard.cpu())), "the copy differs from its source")
        del copied


def _bytes_to_copy(task: Task) -> int:
    import torch

    if not task.is_on_gpu:
        return _REHEARSED_BYTES
    free, _ = torch.cuda.mem_get_info()
    return min(free // 4, shutil.disk_usage("/dev/shm").free // 2, _MAX_BYTES) & ~0xFFF
