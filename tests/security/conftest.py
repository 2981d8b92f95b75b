"""What several tests of security need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory import directory
from tests.security.users import common_directory


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands for /dev/shm."""
    with common_directory() as path:
        monkeypatch.setattr(directory, "SEGMENT_ROOT", path)
        yield path
