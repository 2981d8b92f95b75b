"""Small wrappers that Python's standard library lacks: prctl, process identity, open files.

Process groups, parent-death signals and pid file descriptors are Linux. Thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import select
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

#: the signal that asks a process of ours for its stacks
ASK_SIGNAL = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1
# env_start of /proc/PID/stat, counted from the field after the name
_ENVIRONMENT_STARTS = 47
_ORPHAN_SECONDS = 10.0
# Loaded at import: dlopen between fork and exec is not safe in general.
_libc = ctypes.CDLL(None, use_errno=True)
# Open files for libraries, logs, listeners and the loop; unauthenticated peers may use up to a
# quarter of the limit.
_OWN_FILES = 256


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the *thread* that forked it ends.

    ``parent``: pid of the forking process. If that has ended already, this process ends at once.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def enable_stack_dumps() -> None:
    """Make this process write its stacks to standard error on request, or when it crashes. C code
    does that, which needs neither the interpreter lock nor a running main thread."""
    faulthandler.enable(all_threads=False)
    faulthandler.register(ASK_SIGNAL, all_threads=True)


def start_time(pid: int) -> int | None:
    """Return the clock tick of a process's start, which identifies a process together with its pid.
    None when there is no such process.
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def state_and_cpu_ticks(pid: int) -> tuple[str, int] | None:
    """Return the letter of the scheduler state and the CPU ticks of all threads; None when there is
    no such process."""
    fields = _stat(pid)
    return None if fields is None else (fields[0], int(fields[11]) + int(fields[12]))


def is_alive(pid: int, started: int | None = None) -> bool:
    """Return whether the process exists and is not a zombie; ``started`` guards against a reused
    pid."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX" and started in (None, int(fields[19]))


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (state) on."""
    try:
        # The kernel cuts a process title at 15 bytes, perhaps within a character.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process; do nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_group(group: int) -> None:
    """Kill a process group; do nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def wait_until_ended(pids: Iterable[int], deadline_seconds: float) -> list[int]:
    """Wait until processes that are not our children have ended; return the pids of live
    processes after the deadline."""
    limit = time.monotonic() + deadline_seconds
    alive = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            if not poller.poll(max(0.0, limit - time.monotonic()) * 1000):
                alive.append(pid)
            os.close(handle)
    return alive


class Orphans:
    """Orphans, such as workers of killed members, which this process inherits if it is PID 1 of a
    container."""

    def __init__(self) -> None:
        self._ended: set[int] = set()
        self._look_at = 0.0

    def reap(self) -> None:
        """Reap the zombies that were zombies already some seconds ago: children that our own code
        has started are reaped much sooner. The caller repeats this often."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _ORPHAN_SECONDS
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        stats = {pid: _stat(pid) for pid in numbers}
        own = ["Z", str(os.getpid())]
        ended = {pid for pid, fields in stats.items() if fields and fields[:2] == own}
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def close_inherited(keep: Iterable[int]) -> None:
    """Close every file descriptor except 0, 1, 2 and ``keep``."""
    numbers = {0, 1, 2, *keep}
    for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
        if int(name) not in numbers:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                os.close(int(name))


def forget_variable(name: str) -> None:
    """Remove a variable from the environment, and overwrite its value in /proc/PID/environ, which
    shows the environment with which the process, or the process that forked it, was started."""
    os.environ.pop(name, None)
    block = Path("/proc/self/environ").read_bytes()
    found = re.search(rb"(?:^|\0)%b=([^\0]+)" % name.encode(), block)
    if found:
        facts = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ctypes.memset(int(facts[_ENVIRONMENT_STARTS]) + found.start(1), ord("-"), len(found[1]))


def redirect_output(path: Path) -> None:
    """Append standard output and error to a file, and point standard input at /dev/null."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    for handle in (target, nothing):
        if handle > 2:
            os.close(handle)


def thread_count() -> int:
    """Return the number of threads of this process, including those of C libraries."""
    return len(list(Path("/proc/self/task").iterdir()))


def processes_with_environment(name: str, value: str) -> Iterator[int]:
    """Yield the user's processes that were *started* (by exec) with ``name=value``. A forked
    process counts as started with the environment of its parent."""
    wanted = f"{name}={value}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            block = (entry / "environ").read_bytes()
        except OSError:
            continue  # the process has ended, or belongs to another user
        if wanted in block.split(b"\0"):
            yield int(entry.name)


def needed_by_coordinator(nodes: int) -> int:
    """Return how many open files a coordinator of ``nodes`` (spares included) needs. An agent may
    have three connections: while one replaces another, a third is being accepted.
    """
    return _OWN_FILES + 3 * nodes


def needed_by_agent(nodes: int, nproc: int) -> int:
    """Return how many open files an agent or its vault needs: some for each process of the node,
    and two streams to or from every other node.
    """
    return _OWN_FILES + 8 * nproc + 2 * nodes


def raise_limit(needed: int) -> str:
    """Raise the soft limit of open files to ``needed``, for this process and its children.

    Returns a line of advice when that is not possible, else an empty string.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == needed:
        return ""
    return (
        f"a run of this size may need {needed} open files, and the limit of this host is {hard}:"
        f" raise it (ulimit -Hn {needed}, LimitNOFILE={needed})"
    )
