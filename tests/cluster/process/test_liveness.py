"""Process ends and freezes, with real processes; what Linux offers beyond Python's library."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deadpool_megatron.cluster.agent.members import FreezeDetector
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.children import ChildWatch, ProcessEnd
from tests.common.wait import wait_for

SECONDS = 20.0
TITLE = "import ctypes, signal; ctypes.CDLL(None).prctl(15, 'rank10 \u8bad\u7ec3\u8fdb'.encode());"
PR_SET_CHILD_SUBREAPER = 36


def _quiet(pid: int) -> bool:
    before = posix.state_and_cpu_ticks(pid)
    time.sleep(0.1)
    return before is not None and before[0] == "S" and posix.state_and_cpu_ticks(pid) == before


def test_child_watch_reports_the_end_and_kills_the_group(monkeypatch):
    program = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 11)\n"
    )

    kill_group, states = posix.kill_group, []

    def kill(pid: int) -> None:
        states.append((posix.state_and_cpu_ticks(pid) or ("gone",))[0])
        kill_group(pid)

    monkeypatch.setattr(posix, "kill_group", kill)

    async def watch() -> tuple[ProcessEnd | None, int]:
        process = subprocess.Popen(
            [sys.executable, "-c", program], process_group=0, stdout=subprocess.PIPE
        )
        watched = ChildWatch(process.pid, lambda ending: None)
        process.returncode = 0
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        process.stdout.close()
        await asyncio.wait_for(watched.ended.wait(), SECONDS)
        return watched.ending, grandchild

    ending, grandchild = asyncio.run(watch())
    assert ending == ProcessEnd(signal=signal.SIGSEGV)
    assert states == ["Z"], "its number may be another group's later"
    wait_for("the grandchild to end", lambda: not posix.is_alive(grandchild))


def test_process_with_a_truncated_title_is_watched():
    """The kernel keeps 15 bytes of a title. An agent that could not read one lost its node."""
    program = f"{TITLE} signal.pause()"
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as child:
        try:
            status = Path(f"/proc/{child.pid}/status")
            wait_for("its title", lambda: b"rank10" in status.read_bytes())
            assert posix.is_alive(child.pid, posix.start_time(child.pid))
            wait_for("a sleeping child", lambda: _quiet(child.pid))
            detector = FreezeDetector(child.pid, 3.0, 0.0)
            found = next(look / 10 for look in range(1, 100) if detector.is_frozen(look / 10))
        finally:
            child.kill()
    assert 3.0 <= found <= 3.3


@pytest.fixture
def heir():
    """This process inherits orphans, as the first one of a container does."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("heir")
def test_orphans_are_reaped_and_own_children_are_not(monkeypatch):
    monkeypatch.setattr(posix, "_ORPHAN_SECONDS", 0.0)
    orphans = posix.Orphans()
    # It ends after its parent, which is not to reap it.
    read, write = os.pipe()
    parent = (
        "import os; child = os.fork()\n"
        f"if not child: os.close(1); os.close(2); os.read({read}, 1); os._exit(0)\n"
        "print(child)"
    )
    result = subprocess.run(
        [sys.executable, "-c", parent], pass_fds=[read], capture_output=True, text=True, check=True
    )
    orphan = int(result.stdout)
    os.close(write)
    os.close(read)
    wait_for("the orphan has ended", lambda: (posix.state_and_cpu_ticks(orphan) or "X")[0] == "Z")
    orphans.reap()
    own = subprocess.Popen(["sh", "-c", "exit 3"])
    wait_for("the child has ended", lambda: (posix.state_and_cpu_ticks(own.pid) or "X")[0] == "Z")
    orphans.reap()
    assert posix.state_and_cpu_ticks(orphan) is None
    assert own.wait() == 3
