"""What several tests of the vault need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tight_memory(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB for the segments of one node."""
    mount = tmp_path / "tight"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("may not mount a tmpfs here")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
