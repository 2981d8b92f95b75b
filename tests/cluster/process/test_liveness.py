"""Process ends and freezes, with real processes; what Linux offers beyond Python's library."""

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deadpool_megatron.cluster.agent.members import FreezeDetector
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.children import ChildWatch, ProcessEnd
from deadpool_megatron.cluster.process.posix import needed_by_coordinator, raise_limit
from tests.common.wait import wait_for

SECONDS = 20.0
IDLE = "import signal; signal.pause()"
TITLE = "import ctypes, signal; ctypes.CDLL(None).prctl(15, 'rank10 \u8bad\u7ec3\u8fdb'.encode());"
PR_SET_CHILD_SUBREAPER = 36
INFINITY = resource.RLIM_INFINITY


@pytest.fixture
def start():
    children: list[subprocess.Popen[bytes]] = []

    def begin(program: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-S", "-c", program], process_group=0)
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()


def settle(pid: int) -> None:
    """Until the interpreter has started and sleeps."""
    wait_for("a sleeping child", lambda: _quiet(pid))


def _quiet(pid: int) -> bool:
    before = posix.state_and_cpu_ticks(pid)
    time.sleep(0.1)
    return before is not None and before[0] == "S" and posix.state_and_cpu_ticks(pid) == before


def verdict(detector: FreezeDetector, start_at: float, seconds: float) -> float | None:
    """At which of ten looks per second (times are made up) the process is found frozen."""
    for look in range(1, int(seconds * 10) + 1):
        if detector.is_frozen(start_at + look / 10):
            return look / 10
    return None


def assert_frozen_after_the_limit(detector: FreezeDetector, start_at: float = 0.0) -> None:
    found = verdict(detector, start_at, 10)
    assert found is not None
    assert 3.0 <= found <= 3.3


@pytest.mark.parametrize(
    ("state", "frozen"), [("S", True), ("T", True), ("R", False), ("D", False), ("Z", False)]
)
def test_who_waits_for_a_disk_or_has_ended_is_not_frozen(monkeypatch, state, frozen):
    monkeypatch.setattr(posix, "state_and_cpu_ticks", lambda pid: (state, 5))
    assert (verdict(FreezeDetector(1, 3.0, 0.0), 0.0, 10) is not None) == frozen


def test_beats_and_forgiveness_keep_it_alive(start) -> None:  # type: ignore[no-untyped-def]
    child = start(IDLE)
    settle(child.pid)
    detector = FreezeDetector(child.pid, 3.0, 0.0)
    assert verdict(detector, 0.0, 2.5) is None
    detector.beat(2.5)
    assert verdict(detector, 2.5, 2.5) is None
    detector.reset_timers(100.0, 105.0)
    assert verdict(detector, 103.0, 2.0) is None


def test_what_was_heard_after_a_pause_is_forgiven_nothing(start) -> None:  # type: ignore[no-untyped-def]
    """A host stood still for ten minutes. The beats that waited are read before the pause is
    noticed; a process that freezes then is found after its limit, not ten minutes later."""
    child = start(IDLE)
    settle(child.pid)
    detector = FreezeDetector(child.pid, 3.0, 0.0)
    detector.beat(600.0)
    detector.reset_timers(600.0, 600.0)
    assert_frozen_after_the_limit(detector, 600.0)


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


def test_pid_with_another_start_time_is_another_process():
    own = os.getpid()
    started = posix.start_time(own)
    assert started is not None
    assert posix.is_alive(own, started)
    assert not posix.is_alive(own, started + 1)
    assert posix.start_time(2**22 - 1) is None


def test_a_process_whose_name_is_cut_in_a_letter_is_watched(start) -> None:  # type: ignore[no-untyped-def]
    """The kernel keeps 15 bytes of a title. An agent that could not read one lost its node."""
    child = start(f"{TITLE} signal.pause()")
    status = Path(f"/proc/{child.pid}/status")
    wait_for("its title", lambda: b"rank10" in status.read_bytes())
    started = posix.start_time(child.pid)
    assert posix.is_alive(child.pid, started)
    settle(child.pid)
    assert_frozen_after_the_limit(FreezeDetector(child.pid, 3.0, 0.0))


@pytest.fixture
def heir():
    """This process inherits orphans, as the first one of a container does."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("heir")
def test_orphans_are_reaped_and_own_children_left_to_whoever_waits(monkeypatch):
    monkeypatch.setattr(posix, "_ORPHAN_SECONDS", 0.0)
    orphans = posix.Orphans()
    # It ends after its parent, which is not to reap it.
    read, write = os.pipe()
    parent = (
        "import os; child = os.fork()\n"
        f"if not child: os.close(1); os.close(2); os.read({read}, 1); os._exit(0)\n"
        "print(child)"
    )
    said = subprocess.run(
        [sys.executable, "-c", parent], pass_fds=[read], capture_output=True, text=True, check=True
    )
    orphan = int(said.stdout)
    os.close(write)
    os.close(read)
    wait_for("the orphan has ended", lambda: (posix.state_and_cpu_ticks(orphan) or "X")[0] == "Z")
    orphans.reap()
    own = subprocess.Popen(["sh", "-c", "exit 3"])
    wait_for("the child has ended", lambda: (posix.state_and_cpu_ticks(own.pid) or "X")[0] == "Z")
    orphans.reap()
    assert posix.state_and_cpu_ticks(orphan) is None
    assert own.wait() == 3


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 1 << 20, 12544),
        (1024, INFINITY, 12544),
        (1024, 4096, 4096),
        (20000, 1 << 20, 20000),
        (INFINITY, INFINITY, INFINITY),
    ],
)
def test_the_soft_limit_is_raised(monkeypatch, soft, hard, wanted):
    limits = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.__setitem__(0, pair[0]))
    said = raise_limit(needed_by_coordinator(nodes=4096))
    assert limits == [wanted, hard]
    assert bool(said) == (wanted == 4096)
    if said:
        assert "12544 open files" in said
        assert "LimitNOFILE=12544" in said
