"""How much memory this host would let a run have: /dev/shm, the own cgroup, locked memory.

Shared memory counts in the cgroup of whoever touched it first, which is that of the job: a limit
there ends processes although /dev/shm has room.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# Version 1 writes a number near 2^63 where there is no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class CgroupMemory:
    """The tightest memory limit above this process: bytes that are left, and where it is set."""

    left_bytes: int
    limit_bytes: int
    path: Path


def cgroup_memory(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> CgroupMemory | None:
    """Of versions 1 and 2, over all levels from the own group up; None without any limit."""
    found = list(_limits(root, own))
    return min(found, key=lambda one: one.left_bytes, default=None)


def _limits(root: Path, own: Path) -> Iterator[CgroupMemory]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path is often that of the host, and the root is the own group.
        group = top / path.lstrip("/")
        for level in (group, *group.parents):
            if level.is_relative_to(top) and (found := _read(level, *names)) is not None:
                yield found


def _read(group: Path, limit_name: str, usage_name: str) -> CgroupMemory | None:
    try:
        text = (group / limit_name).read_text().strip()
        if text == "max" or (limit := int(text)) >= _NO_LIMIT:
            return None
        used = int((group / usage_name).read_text()) - _reclaimable(group)
    except (OSError, ValueError):
        return None
    return CgroupMemory(max(0, limit - used), limit, group)


def _reclaimable(group: Path) -> int:
    """Page cache of files on disk, which the kernel gives up before it ends anybody."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines)
    # Not "file" or "cache": those count shared memory as well.
    names = ("inactive_file", "active_file")
    if "total_inactive_file" in fields:
        names = ("total_inactive_file", "total_active_file")
    return sum(int(fields.get(name, 0)) for name in names)


def free_bytes(directory: Path) -> int:
    """What the file system of a directory has left."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def memlock_bytes() -> int | None:
    """How much this process may lock in memory; None for any amount."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
