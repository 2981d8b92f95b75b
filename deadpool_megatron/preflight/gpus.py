"""The GPUs of this host: how many there are, which of them a process sees, and who gets which.

Loads neither torch nor the driver: processes may still be forked.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

#: says which GPUs a process sees: numbers or names, in the order in which it counts them
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_SECONDS = 20.0


def count_gpus() -> int:
    """Returns how many GPUs this container may use, by nvidia-smi; without it, how many the driver
    knows.

    A GPU that has fallen off the bus is in the driver's list, but not in that of nvidia-smi.
    """
    if shutil.which("nvidia-smi") is not None:
        try:
            listed = subprocess.run(
                ["nvidia-smi", "-L"],
                capture_output=True,
                text=True,
                timeout=_NVIDIA_SMI_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return 0  # a driver that does not answer is of no use to training either
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the GPUs that a process with this environment sees, as :data:`VISIBLE` names them."""
    named = environment.get(VISIBLE)
    if named is not None and not named.strip():
        return ()
    count = count_gpus()
    if named is None or not count:
        return tuple(map(str, range(count)))
    found: list[str] = []
    for name in (part.strip() for part in named.split(",")):
        # What cannot be a GPU hides all that is named behind it.
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= count):
            break
        found.append(name)
    return tuple(found)


def share_of(gpus: Sequence[str], number: int, size: int) -> str:
    """Returns the value of :data:`VISIBLE` for share ``number``, each of them of ``size`` GPUs."""
    return ",".join(gpus[number * size : (number + 1) * size])
