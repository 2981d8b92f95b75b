"""Logs, in which the processes of a node write what they print: in the memory of the host.

A file system that is full, or hangs, must not fail or stop a process that prints. What is written
here is copied to the run directory by the process that does file operations (file_worker.py).
"""

from __future__ import annotations

import contextlib
import mmap
import time
from pathlib import Path

# Of what one process has printed; more than can be copied in time is given up, the oldest first.
_MOST_BYTES = 16 << 20
_TRIM_SECONDS = 5.0


class LocalLogs:
    """Makes the directory. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self._next = 0.0

    def log(self, name: str) -> Path:
        """``name``: as in :meth:`.directory.RunDirectory.log`."""
        return self.directory / f"{name}.log"

    def trim(self) -> None:
        """Give back the memory of all but the newest part of each log; to be called often."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _TRIM_SECONDS
        # A host that is out of descriptors or memory for a moment: the next turn does it.
        with contextlib.suppress(OSError):
            for path in self.directory.glob("*.log"):
                _trim(path)


def _trim(path: Path) -> None:
    found = path.stat()
    surplus = (found.st_size - _MOST_BYTES) // mmap.ALLOCATIONGRANULARITY
    if surplus > 0 and found.st_blocks * 512 > 2 * _MOST_BYTES:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), found.st_size) as mapped:
            mapped.madvise(mmap.MADV_REMOVE, 0, surplus * mmap.ALLOCATIONGRANULARITY)
