"""What Linux offers to processes, beyond Python's library."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator

import pytest

from deadpool_megatron.cluster.process import posix
from tests.common.waiting import wait_for

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def heir() -> Iterator[None]:
    """This process inherits orphans, as the first one of a container does."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("heir")
def test_orphans_are_reaped_and_own_children_left_to_whoever_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(posix, "_ORPHAN_SECONDS", 0.0)
    orphans = posix.Orphans(inherits=True)
    said = subprocess.run(
        ["sh", "-c", "sleep 0 & echo $!"], capture_output=True, text=True, check=True
    )
    orphan = int(said.stdout)
    wait_for("the orphan has ended", lambda: (posix.state_and_cpu_ticks(orphan) or "X")[0] == "Z")
    orphans.reap()
    own = subprocess.Popen(["sh", "-c", "exit 3"])
    wait_for("the child has ended", lambda: (posix.state_and_cpu_ticks(own.pid) or "X")[0] == "Z")
    orphans.reap()
    assert posix.state_and_cpu_ticks(orphan) is None
    assert own.wait() == 3
    assert posix.Orphans()._inherits is False
