"""Fixtures of the tests of security."""

import pytest

from deadpool_megatron.cluster.run_directory import directory
from tests.security.users import common_directory


@pytest.fixture
def place(monkeypatch):
    """A stand-in for /dev/shm."""
    with common_directory() as path:
        monkeypatch.setattr(directory, "SEGMENT_ROOT", path)
        yield path
