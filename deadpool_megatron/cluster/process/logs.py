"""Logs of a node's processes in the memory of its host, and files of the run directory.

A file system that is full, or hangs, must not fail or stop a process that prints, nor an agent that
has to send beats and to fence its node. So logs lie in memory. A thread of the agent copies them to
the run directory and does the other work there, one task after the other. This module also reads
the cause of a process's end from the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deadpool_megatron import file_systems

_LOOK_SECONDS = 0.2
_PIECE_BYTES = 1 << 20
# Limit for the log of one process. A longer log loses its oldest part, whether copied or not.
_MAX_BYTES = 16 << 20
_TRIM_SECONDS = 5.0
# Limit of the wait for the lock, which a process whose file system hangs may hold.
_LOCK_SECONDS = 2.0
_COPIED, _LOCK = ".copied", ".lock"
# This much of the end of a log is searched for the cause.
_TAIL_BYTES = 32768
_LINE_CHARACTERS = 400
# An exception that was caught and logged long before the end is not its cause.
_TRACEBACK_LINES = 120
_TRACEBACK = "Traceback (most recent call last):"


def read(path: Path, start: int, nbytes: int) -> str:
    """Return at most ``nbytes`` of a file from ``start`` on (negative: counted from its end);
    empty without a file.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start if start >= 0 else max(0, os.fstat(file.fileno()).st_size + start))
            return file.read(nbytes).decode(errors="replace")
    except OSError:
        return ""


def tail(log: Path) -> str:
    """Return the end of a log, which may begin within a line; empty when there is no log."""
    return read(log, -_TAIL_BYTES, _TAIL_BYTES)


def last_line(log: Path) -> str:
    """Return the line of a log that explains the end of its process; see :func:`last_output`."""
    return last_output(tail(log))


def last_output(text: str) -> str:
    """Return the line at the end of a log that explains the end of its process.

    That is :func:`fatal_error`, else the last line that is not blank, else an empty text.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return fatal_error(text) or (lines[-1][:_LINE_CHARACTERS] if lines else "")


def fatal_error(text: str) -> str:
    """Return the exception of the last traceback, or the fatal error of Python or of C++, at the
    end of a log; empty when there is no such error.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number].strip()
        if line.startswith("what():"):
            return line.removeprefix("what():").strip()[:_LINE_CHARACTERS]
        if line.startswith("Fatal Python error:"):
            return line[:_LINE_CHARACTERS]
        if line.endswith(_TRACEBACK) and len(lines) - number <= _TRACEBACK_LINES:
            # The exception is the first line after the frames, which are indented.
            after = lines[number + 1 :]
            error = next((line for line in after if not line.startswith((" ", "\t", "|"))), "")
            if error:
                return error[:_LINE_CHARACTERS]
    return ""


class LocalLogs:
    """The logs of a node in memory; the constructor makes the directory. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self._next = 0.0

    def log(self, name: str) -> Path:
        """Return the path of a log; ``name`` as in :meth:`.directory.RunDirectory.log`."""
        return self.directory / f"{name}.log"

    def trim(self) -> None:
        """Free the memory of each log except for its newest part; the caller repeats this often."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _TRIM_SECONDS
        # If the host is briefly out of descriptors or memory, the next call trims the logs.
        with contextlib.suppress(OSError):
            for path in self.directory.glob("*.log"):
                _trim(path)


def _trim(path: Path) -> None:
    status = path.stat()
    surplus = (status.st_size - _MAX_BYTES) // mmap.ALLOCATIONGRANULARITY
    if surplus > 0 and status.st_blocks * 512 > 2 * _MAX_BYTES:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), status.st_size) as mapped:
            mapped.madvise(mmap.MADV_REMOVE, 0, surplus * mmap.ALLOCATIONGRANULARITY)


class LogCopier:
    """The incremental copy of logs. A file next to the logs records for a successor how far each
    log is copied, and the length of the target before the copy in progress. If the copier is
    killed, the growth of the target shows how much was copied. For one thread.
    """

    def __init__(self, logs: Path, target: Path) -> None:
        self._logs, self._target = logs, target
        self._copied: dict[str, int] = {}
        self._finished: list[str] = []

    def finish_log(self, name: str) -> None:
        """Free the memory of a finished log as soon as it is in the target."""
        self._finished.append(name)

    def copy(self) -> str:
        """Copy all new output. Return why some could not be copied, empty on success."""
        try:
            finished = self._finished.copy()  # before the scan, which then sees all their output
            grown = [entry for entry in os.scandir(self._logs) if self._has_grown(entry)]
            if grown or finished:
                with open(self._logs / _LOCK, "w") as lock:
                    file_systems.lock(lock.fileno(), self._logs / _LOCK, _LOCK_SECONDS)
                    self._copy_all(grown, finished)
        except OSError as error:  # the next call copies what is missing
            return str(error)
        return ""

    def _has_grown(self, entry: os.DirEntry[str]) -> bool:
        copied = self._copied.get(entry.name, 0)
        return not entry.name.startswith(".") and entry.stat().st_size > copied

    def _copy_all(self, grown: list[os.DirEntry[str]], finished: list[str]) -> None:
        """Copy under the lock, after reading how far other processes have copied."""
        # An unreadable record (perhaps of another version) only leads to duplicate lines.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            record = json.loads((self._logs / _COPIED).read_text())
            self._copied = record["copied"]
            for name, nbytes_before in record["under_way"].items():
                nbytes = (self._target / name).stat().st_size
                self._copied[name] = self._copied.get(name, 0) + max(0, nbytes - nbytes_before)
        failed: dict[str, OSError] = {}
        try:
            for entry in grown:
                try:
                    self._copy(entry)
                except OSError as error:  # one log must not prevent the copy of the others
                    failed[entry.name] = error
            for name in [name for name in finished if name not in failed]:
                (self._logs / name).unlink(missing_ok=True)
                self._copied.pop(name, None)
                self._finished.remove(name)
        finally:
            self._write_record({})
        if failed:
            raise next(iter(failed.values()))

    def _write_record(self, under_way: dict[str, int]) -> None:
        record = {"copied": self._copied, "under_way": under_way}
        file_systems.write_text(self._logs / _COPIED, json.dumps(record))

    def _copy(self, entry: os.DirEntry[str]) -> None:
        if not self._has_grown(entry):
            return
        start = self._copied.get(entry.name, 0)
        with open(entry.path, "rb", buffering=0) as log:
            # If a log has grown too long while nothing could be copied, its oldest part is missing.
            data = os.lseek(log.fileno(), start, os.SEEK_DATA)
            target = os.open(
                self._target / entry.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
            )
            try:
                if data > start:
                    os.write(target, f"\n[{data - start} bytes are missing here]\n".encode())
                    self._copied[entry.name] = data
                self._write_record({entry.name: os.fstat(target).st_size})
                log.seek(data)
                while piece := log.read(_PIECE_BYTES):
                    while piece:
                        written = os.write(target, piece)
                        self._copied[entry.name] = self._copied.get(entry.name, 0) + written
                        piece = piece[written:]
            finally:
                os.close(target)


class Files:
    """A thread that copies the output in ``logs`` to ``target``, and carries out requests in
    between. Failures are reported on standard error. For one loop.
    """

    def __init__(
        self, logs: Path, target: Path, check_own: Callable[[], None] = lambda: None
    ) -> None:
        """``check_own()`` raises OSError where another run has taken over the directory."""
        self._copier, self._check_own = LogCopier(logs, target), check_own
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._texts: dict[Path, str | None] = {}  # the newest text for each path
        threading.Thread(target=self._serve, name="dp-files", daemon=True).start()

    def replace(self, path: Path, text: str | None) -> None:
        """Write this text to a file, or (None) remove it, as soon as that is possible."""
        self._texts[path] = text
        self._work.put(self._write)

    def finish_log(self, log: Path) -> None:
        """Free the memory of a finished log once it is in ``target``."""
        self._work.put(lambda: self._copier.finish_log(log.name))

    async def close(self, limit_seconds: float) -> None:
        """Wait until all work is done and all output so far is copied, or until the limit is over.
        The thread ends when it has done its work.
        """
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def finish() -> None:
            if error := self._copier.copy():
                print(f"not copied: {error}", file=sys.stderr)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        self._work.put(finish)
        self._work.put(None)
        try:
            await asyncio.wait_for(done.wait(), limit_seconds)
        except TimeoutError:
            names = ", ".join(str(path) for path in self._texts) or "what is under way"
            print(f"not written within {limit_seconds:g} s: {names}", file=sys.stderr)

    def _serve(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                work = self._copier.copy
            if work is None:
                return
            try:
                work()
            except OSError as trouble:
                print(f"not done: {trouble}", file=sys.stderr)

    def _write(self) -> None:
        while self._texts:
            self._check_own()
            path, text = self._texts.popitem()
            if text is None:
                path.unlink(missing_ok=True)
            else:
                file_systems.write_text(path, text)
