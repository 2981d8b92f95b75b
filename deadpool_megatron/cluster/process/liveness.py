"""Signs of life: freezes by missing beats and idle CPU; what the end of a log says about the end of
its process; things that may hang for as long as a network file system does: a look at one, and the
end of a process whose threads wait for one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Generic, TypeVar

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.logs import read

_TAIL_BYTES = 32768
_LINE_CHARACTERS = 400
# An exception that was caught and logged long before the end is not the cause of it.
_TRACEBACK_LINES = 120
_TRACEBACK = "Traceback (most recent call last):"
T = TypeVar("T")


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


class Glance(Generic[T]):
    """Reads in a thread of its own, one reading at a time. For one caller."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._found: list[T] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def look(self, limit_seconds: float) -> T:
        """Returns what a reading found that has just ended. Raises what the reading raised, and
        TimeoutError when it takes longer; it then continues, for the next look.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._thread.join(limit_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {limit_seconds:g} s")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._found.pop()

    def _work(self) -> None:
        try:
            self._found.append(self._read())
        except Exception as error:
            self._error = error


def run_to_end(main: Coroutine[Any, Any, int], thread_seconds: float) -> int:
    """As ``asyncio.run``, which waits for what is under way in the loop's threads, but no longer
    than ``thread_seconds`` after ``main`` is over: the process then ends with its answer, here.
    """
    with asyncio.Runner() as runner:
        status = runner.run(main)
        guard = threading.Timer(thread_seconds, _give_up, (status, thread_seconds))
        guard.daemon = True
        guard.start()
    guard.cancel()
    return status


def _give_up(status: int, seconds: float) -> None:
    text = f"ends without its threads: waited {seconds:g} s for files that they write or remove"
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)
