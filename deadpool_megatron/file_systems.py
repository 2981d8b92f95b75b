"""What is on the disk also after a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have a file or the names in a directory on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
