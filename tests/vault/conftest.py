"""What several tests of the vault need."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def file_system(mount: Path, size: str) -> Iterator[Path]:
    """One of this size, in memory. Skips the test where it may not be had."""
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("may not mount a tmpfs here")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture
def tight_memory(tmp_path):
    """3 MB for the segments of one node."""
    with file_system(tmp_path / "tight", "3m") as mount:
        yield mount


@pytest.fixture
def small_disk(tmp_path):
    """1 MB."""
    with file_system(tmp_path / "small", "1m") as mount:
        yield mount
