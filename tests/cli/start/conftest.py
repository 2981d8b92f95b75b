"""What tests of starts need."""

import pytest

from deadpool_megatron.cli.start import launch
from deadpool_megatron.hookpoints import SCRIPT_VARIABLE


@pytest.fixture
def started(monkeypatch):
    """The arguments of launchers; none of them starts anything."""
    seen: list[launch.Launcher] = []
    monkeypatch.setattr(launch.Launcher, "run", lambda self: seen.append(self) or 0)
    monkeypatch.setenv(SCRIPT_VARIABLE, "left over")
    return seen
