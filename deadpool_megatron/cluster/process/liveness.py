"""Signs of life: process ends by pid file descriptor, freezes by missing beats and idle CPU; what
the end of a log says about the end of its process.

Used from an asyncio loop in a single-threaded process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.file_worker import read

_TAIL_BYTES = 32768
_LINE_CHARACTERS = 400
# An exception that was caught and logged long before the end is not the cause of it.
_TRACEBACK_LINES = 120
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Ending:
    """The end of a process: exactly one of the two is set."""

    exit_code: int | None = None
    signal_name: str | None = None

    @staticmethod
    def from_wait_status(status: int) -> Ending:
        """From what ``waitpid`` answers."""
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return Ending(exit_code=code)
        try:
            return Ending(signal_name=signal.Signals(-code).name)
        except ValueError:
            return Ending(signal_name=f"signal {-code}")

    def to_dict(self) -> dict[str, Any]:
        """As an agent tells it."""
        if self.signal_name is not None:
            return {"signal": self.signal_name}
        return {"exit_code": self.exit_code}

    def __str__(self) -> str:
        if self.signal_name is not None:
            return f"killed by {self.signal_name}"
        return f"ended with exit status {self.exit_code}"


class ChildWatch:
    """Calls back once when a child ends, after killing the rest of its process group.

    The group goes first, while the dead leader still holds the group's number.
    """

    def __init__(self, pid: int, on_end: Callable[[Ending], None]) -> None:
        """Raises OSError when there is no descriptor for it; the child has ended by then."""
        self.pid = pid
        self.ended = asyncio.Event()
        self.ending: Ending | None = None
        self._on_end = on_end
        try:
            self._handle = os.pidfd_open(pid)
        except OSError:
            self.kill()  # nobody would ever hear of its end
            os.waitpid(pid, 0)
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._gone)

    def kill(self) -> None:
        """SIGKILL the process group; also ends a stopped one."""
        if self.ending is None:
            posix.kill(self.pid)  # it may not have made its own group yet
            posix.kill_group(self.pid)

    async def end(self, limit_seconds: float) -> bool:
        """SIGKILL it and wait for its end; False where the kernel holds it for longer, as in a call
        to a file system that hangs: it dies later.
        """
        self.kill()
        try:
            async with asyncio.timeout(limit_seconds):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True

    def _gone(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        posix.kill_group(self.pid)
        _, status = os.waitpid(self.pid, 0)
        self.ending = Ending.from_wait_status(status)
        self.ended.set()
        self._on_end(self.ending)


class FreezeDetector:
    """Decides whether a process that has stopped beating is frozen.

    Missing beats alone prove nothing on a busy machine or in a long call that holds the
    interpreter: a process that used CPU time, or wants to run, shows a sign of life. A frozen one
    is stopped, or sleeps without having run at all.
    """

    def __init__(self, pid: int, freeze_seconds: float, now: float) -> None:
        self._pid = pid
        self._freeze_seconds = freeze_seconds
        self._ticks = -1
        self._alive_at = now

    def beat(self, now: float) -> None:
        """A beat arrived."""
        self._alive_at = now

    def forgive(self, seconds: float, now: float) -> None:
        """The watching process itself did not run for so long: nobody else is to blame."""
        self._alive_at = min(self._alive_at + seconds, now)

    def silent_seconds(self, now: float) -> float:
        """Time since the last sign of life."""
        return now - self._alive_at

    def is_frozen(self, now: float) -> bool:
        """Cheap while beats arrive: looks at the process only after two missed beats' time."""
        if now - self._alive_at < self._freeze_seconds / 3:
            return False
        found = posix.state_and_cpu_ticks(self._pid)
        if found is None or found[0] in "ZX":
            return False  # ended: the pid file descriptor reports that
        state, ticks = found
        if state not in "Tt" and (state in "RD" or ticks != self._ticks):
            self._ticks = ticks
            self._alive_at = now - self._freeze_seconds / 3
            return False
        return now - self._alive_at >= self._freeze_seconds


def tail(log: Path) -> str:
    """Return the end of a log, from somewhere in a line; empty when there is none."""
    return read(log, -_TAIL_BYTES, _TAIL_BYTES)


def last_line(log: Path) -> str:
    """Return what a log says about the end of its process; see :func:`last_words`."""
    return last_words(tail(log))


def last_words(text: str) -> str:
    """Return what the end of a log says about the end of its process, in one line.

    That is :func:`fatal_words`, else the last line that is not blank. Empty when there is none.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return fatal_words(text) or (lines[-1][:_LINE_CHARACTERS] if lines else "")


def fatal_words(text: str) -> str:
    """The exception of the last traceback, or the fatal error of Python or of C++, at the end of a
    log. Empty when there is none.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number].strip()
        if line.startswith("what():"):
            return line.removeprefix("what():").strip()[:_LINE_CHARACTERS]
        if line.startswith("Fatal Python error:"):
            return line[:_LINE_CHARACTERS]
        if line.endswith(_TRACEBACK) and len(lines) - number <= _TRACEBACK_LINES:
            found = _exception(lines[number + 1 :])
            if found:
                return found[:_LINE_CHARACTERS]
    return ""


def _exception(lines: list[str]) -> str:
    """The first line after the frames of a traceback, which are indented."""
    return next((line for line in lines if not line.startswith((" ", "\t", "|"))), "")
