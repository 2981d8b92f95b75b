"""Children of a process with an asyncio loop: their start, and their end by process descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.failures import signal_name
from deadpool_megatron.process_names import interpreter
from deadpool_megatron.vault.errors import is_shortage

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
Made = TypeVar("Made")


@contextlib.contextmanager
def socket_pair(kind: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Create a connection to a child: yield our end and the child's end. Close the child's end
    afterwards, and our end after an error."""
    own_end, child_end = socket.socketpair(socket.AF_UNIX, kind)
    with child_end:
        try:
            yield own_end, child_end
        except BaseException:
            own_end.close()
            raise


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process; exactly one field is set."""

    exit_code: int | None = None
    signal: int | None = None

    @staticmethod
    def from_wait_status(status: int) -> ProcessEnd:
        """Return the end that a status of ``waitpid`` means."""
        code = os.waitstatus_to_exitcode(status)
        return ProcessEnd(exit_code=code) if code >= 0 else ProcessEnd(signal=-code)

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return f"ended with exit status {self.exit_code}"


class Watch(ABC):
    """A watch of a process. The end of the process is reported once, to ``on_end``, after the other
    processes of its group are killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = asyncio.Event()
        self.ending: ProcessEnd | None = None
        self._on_end: Callable[[ProcessEnd], None] | None = None

    def then(self, on_end: Callable[[ProcessEnd], None]) -> None:
        """Have the loop call ``on_end`` at the end of the process, or soon if it has ended
        already."""
        self._on_end = on_end
        if self.ending is not None:
            asyncio.get_running_loop().call_soon(on_end, self.ending)

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; do nothing if the process has ended."""

    async def end(self, limit_seconds: float) -> bool:
        """Kill the process and wait for its end. Return False after the limit: the kernel may hold
        the process for longer, as in a call to a file system that hangs.
        """
        self.kill()
        try:
            async with asyncio.timeout(limit_seconds):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True

    def finish(self, ending: ProcessEnd) -> None:
        """Record and report the end of the reaped process."""
        self.ending = ending
        self.ended.set()
        if self._on_end is not None:
            self._on_end(ending)


class ChildWatch(Watch):
    """A watch of a child of this process. The other processes of its group are killed while the
    dead leader still holds the id of the group.
    """

    def __init__(self, pid: int, on_end: Callable[[ProcessEnd], None] | None = None) -> None:
        """Watch a child. Raises OSError when no descriptor can be opened; the child is killed."""
        super().__init__(pid)
        self._on_end = on_end
        try:
            self._handle = os.pidfd_open(pid)
        except OSError:
            self.kill()  # as the end of the process would never be noticed
            os.waitpid(pid, 0)
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._reap)

    def kill(self) -> None:
        """Kill the process and its group; see :class:`Watch`."""
        if self.ending is None:
            posix.kill(self.pid)  # the process may not have a group of its own yet
            posix.kill_group(self.pid)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        posix.kill_group(self.pid)
        _, status = os.waitpid(self.pid, 0)
        self.finish(ProcessEnd.from_wait_status(status))


def start_child(
    command: Sequence[str],
    on_end: Callable[[ProcessEnd], None] | None = None,
    *,
    log: Path | int | None = None,
    environment: Mapping[str, str] | None = None,
    sockets: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    dies_with_us: bool = False,
) -> ChildWatch:
    """Start this interpreter with ``command``, in its own process group.

    The output of the child is appended to ``log`` (None: the output of this process);
    ``environment`` is added to that of this process; ``sockets`` are descriptors that the child
    inherits under their numbers. ``dies_with_us``: the child dies with the calling thread. For the
    loop's thread; raises OSError.
    """
    parent = os.getpid()
    opened = -1
    if isinstance(log, Path):
        log = opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        process = subprocess.Popen(
            interpreter(*command),
            pass_fds=tuple(sockets),
            stdin=stdin,
            stdout=log,
            stderr=log,
            process_group=0,
            env={**os.environ, **(environment or {})},
            preexec_fn=(lambda: posix.die_with_parent(parent)) if dies_with_us else None,
        )
    finally:
        if opened >= 0:
            os.close(opened)
    process.returncode = 0  # ChildWatch reaps the child, so this object must not try to
    return ChildWatch(process.pid, on_end)


async def run_child(command: Sequence[str], log: Path, limit_seconds: float) -> str:
    """Return the last line that a child prints to ``log``; kill the child after the limit.

    Raises OSError or TimeoutError.
    """
    log.unlink(missing_ok=True)
    child = start_child(command, log=log)
    try:
        await asyncio.wait_for(child.ended.wait(), limit_seconds)
    finally:
        child.kill()
    *_, line = log.read_text().splitlines() or [""]
    return line


async def retry_shortage(make: Callable[[], Awaitable[Made]], limit_seconds: float) -> Made:
    """Return the result of ``make``, retried with growing pauses while a resource is short.

    Raises an OSError of ``make`` when it is no shortage, or when the time is over, and any other
    exception of ``make`` at once.
    """
    pause, limit = FIRST_PAUSE_SECONDS, time.monotonic() + limit_seconds
    while True:
        try:
            return await make()
        except OSError as error:
            if not is_shortage(error) or time.monotonic() + pause > limit:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
