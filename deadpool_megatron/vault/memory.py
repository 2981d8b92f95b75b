"""Memory behind the files of slots."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from deadpool_megatron.vault.errors import VaultError


def allocate(file: int, path: Path, ranges: list[tuple[int, int]]) -> None:
    """Reserve memory now: a full file system must be an error here, not SIGBUS later.

    ``ranges``: (start, bytes). Raises VaultError, naming the file system, when there is no room.
    """
    try:
        for start, count in ranges:
            if count:
                os.posix_fallocate(file, start, count)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        free = os.statvfs(path.parent)
        needed = sum(count for _, count in ranges)
        raise VaultError(
            f"no room for {path.name}: {needed} bytes needed on {path.parent}"
            f" (shared memory, usually /dev/shm), {free.f_bavail * free.f_frsize} free:"
            " enlarge it (mount -o remount,size=..., docker --shm-size) or use fewer slots"
        ) from error
