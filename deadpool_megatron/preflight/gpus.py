"""The GPUs of this host: how many there are, which of them a process sees, and who gets which.

Loads neither torch nor the driver: processes may still be forked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

#: says which GPUs a process sees: numbers or names, in the order in which it counts them
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_SECONDS = 20.0
_LISTED = re.compile(r"^\s*(GPU|MIG) .*\(UUID: ([^)\s]+)\)", re.MULTILINE)


def listed_gpus() -> tuple[str, ...]:
    """Returns the GPUs that this container may use: what nvidia-smi says is the UUID of each, and
    those of MIG devices in the place of their GPU; without it, the numbers of those that the driver
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
            return ()  # a driver that does not answer is of no use to training either
        gpus: list[list[str]] = []
        for kind, uuid in _LISTED.findall(listed.stdout):
            if kind == "GPU" or not gpus:
                gpus.append([uuid])
            else:
                gpus[-1].append(uuid)
        return tuple(uuid for whole, *parts in gpus for uuid in parts or [whole])
    try:
        return tuple(map(str, range(len(list(Path("/proc/driver/nvidia/gpus").iterdir())))))
    except OSError:
        return ()


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the GPUs that a process with this environment sees, by their UUIDs where they are
    known: a number means another GPU when one before it is gone.
    """
    named = environment.get(VISIBLE)
    if named is not None and not named.strip():
        return ()
    listed = listed_gpus()
    if named is None or not listed:
        return listed
    found: list[str] = []
    for name in (part.strip() for part in named.split(",")):
        if name.isdigit():
            same = listed[int(name) : int(name) + 1]
        else:
            # Names may be cut short; where only numbers are known, they are taken as they are.
            is_known = not listed[0].isdigit()
            same = tuple(g for g in listed if name and g.startswith(name)) if is_known else (name,)
        # What cannot be a GPU hides all that is named behind it.
        if not same or not name or name.startswith("-"):
            break
        found.append(same[0])
    return tuple(found)


def of_member(gpus: Sequence[str], slot: int, *, may_share: bool) -> dict[str, str]:
    """Returns the variables with which member ``slot`` of a node sees its own GPU of these, and no
    other: as number 0 then, for the script that takes its device before it joins. Where members
    may not share, one without a GPU of its own sees none.
    """
    if may_share and not gpus:
        return {"LOCAL_RANK": str(slot)}
    own = slot % len(gpus) if may_share else slot
    return {"LOCAL_RANK": "0", VISIBLE: "".join(gpus[own : own + 1])}


def share_of(gpus: Sequence[str], number: int, size: int) -> str:
    """Returns the value of :data:`VISIBLE` for share ``number``, each of them of ``size`` GPUs."""
    return ",".join(gpus[number * size : (number + 1) * size])
