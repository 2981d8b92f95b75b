"""A process that does file operations one after the other, for one that must not hang with them.

``file_worker.py LOGS TARGET`` also appends what is written to the files in ``LOGS``, which is in
this host's memory, to those of the same names in ``TARGET``, which may be full, or hang. Reads one
request per line of standard input, a JSON object, and answers each with a line; at the end of it
the logs are copied once more. Only the standard library is imported, so that it starts at once (see
files.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

_LOOK_SECONDS = 0.2
_PIECE_BYTES = 1 << 20
# At the end nobody waits for a file system that hangs.
_LAST_SECONDS = 2
_PAUSE_SECONDS = 0.01
_COPIED, _LOCK = ".copied", ".lock"


def read(path: Path, start: int, nbytes: int) -> str:
    """Returns what a file holds from ``start`` on (negative: so far from its end), at most
    ``nbytes``; empty without a file.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start if start >= 0 else max(0, os.fstat(file.fileno()).st_size + start))
            return file.read(nbytes).decode(errors="replace")
    except OSError:
        return ""


def replace(path: Path, text: str | None) -> None:
    """Have a file hold this text, never a part of it, or (None) be gone. Raises OSError."""
    if text is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # Readable by others where the umask lets them, but never theirs to write: listings of processes
    # to kill are among these files.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    temporary.replace(path)


class LogCopier:
    """Copies what logs have grown by. How far it is stands beside them, for whoever continues, and
    of the log that is being copied how long the target was before: the target itself tells how far
    one has come that was killed meanwhile.
    """

    def __init__(self, logs: Path, target: Path) -> None:
        self._logs, self._target = logs, target
        self._turn = threading.Lock()
        self._copied: dict[str, int] = {}
        self._over: list[str] = []

    def is_over(self, name: str) -> None:
        """Nobody prints to this log any more: it leaves memory as soon as it is in the target."""
        self._over.append(name)

    def watch(self) -> None:
        """Copy for ever."""
        while True:
            self.copy()
            time.sleep(_LOOK_SECONDS)

    def copy(self) -> str:
        """Copy what there is. Returns why not all of it could be copied, empty if it could."""
        with self._turn:
            try:
                over = self._over.copy()  # before the look, which finds all that they have
                grown = [entry for entry in os.scandir(self._logs) if self._has_grown(entry)]
                if grown or over:
                    with open(self._logs / _LOCK, "w") as lock:
                        _wait_for(lock)
                        self._copy_all(grown, over)
            except OSError as error:  # what is left stays, for the next time
                return str(error)
        return ""

    def _has_grown(self, entry: os.DirEntry[str]) -> bool:
        copied = self._copied.get(entry.name, 0)
        return not entry.name.startswith(".") and entry.stat().st_size > copied

    def _copy_all(self, grown: list[os.DirEntry[str]], over: list[str]) -> None:
        """With the lock: another process may have copied meanwhile."""
        # An unreadable record (of another version, for one) costs lines that are there twice.
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
                except OSError as error:  # of one log; it must not keep the others
                    failed[entry.name] = error
            for name in [name for name in over if name not in failed]:
                (self._logs / name).unlink(missing_ok=True)
                self._copied.pop(name, None)
                self._over.remove(name)
        finally:
            self._keep({})
        if failed:
            raise next(iter(failed.values()))

    def _keep(self, under_way: dict[str, int]) -> None:
        record = {"copied": self._copied, "under_way": under_way}
        replace(self._logs / _COPIED, json.dumps(record))

    def _copy(self, entry: os.DirEntry[str]) -> None:
        if not self._has_grown(entry):
            return
        start = self._copied.get(entry.name, 0)
        with open(entry.path, "rb", buffering=0) as log:
            # Of a log that grew too long while nothing could be copied the oldest part is gone.
            data = os.lseek(log.fileno(), start, os.SEEK_DATA)
            target = os.open(
                self._target / entry.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
            )
            try:
                if data > start:
                    os.write(target, f"\n[{data - start} bytes are missing here]\n".encode())
                    self._copied[entry.name] = data
                self._keep({entry.name: os.fstat(target).st_size})
                log.seek(data)
                while piece := log.read(_PIECE_BYTES):
                    while piece:
                        written = os.write(target, piece)
                        self._copied[entry.name] = self._copied.get(entry.name, 0) + written
                        piece = piece[written:]
            finally:
                os.close(target)


def _wait_for(lock: TextIO) -> None:
    """Raises OSError when another process has it for longer than copying takes."""
    limit = time.monotonic() + _LAST_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > limit:
                raise
            time.sleep(_PAUSE_SECONDS)


def answer(request: dict[str, str], copier: LogCopier) -> tuple[str, str]:
    """Returns the text that a request asks for, and what went wrong."""
    try:
        if request["do"] == "copy":
            return "", copier.copy()
        path = Path(request["path"])
        if request["do"] == "over":
            copier.is_over(path.name)
            return "", ""
        if request["do"] == "read":
            return read(path, int(request["start"]), int(request["nbytes"])), ""
        replace(path, request["text"])
    except OSError as trouble:
        return "", f"{request['path']}: {trouble}"
    return "", ""


def main() -> None:
    """Until the end of standard input."""
    copier = LogCopier(Path(sys.argv[1]), Path(sys.argv[2]))
    threading.Thread(target=copier.watch, daemon=True).start()
    for line in sys.stdin:
        text, error = answer(json.loads(line), copier)
        print(json.dumps({"text": text, "error": error}), flush=True)
    signal.alarm(_LAST_SECONDS)
    copier.copy()


if __name__ == "__main__":
    main()
