"""A process that does file operations one after the other, for one that must not hang with them.

``file_worker.py LOGS TARGET`` also appends what is written to the files in ``LOGS``, which is in
this host's memory, to those of the same names in ``TARGET``, which may be full, or hang. Reads one
request per line of standard input, a JSON object, and answers each with a line; at the end of it
the logs are copied once more. Only the standard library is imported, so that it starts at once (see
files.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

_LOOK_SECONDS = 0.2
_PIECE_BYTES = 1 << 20
# At the end nobody waits for a file system that hangs.
_LAST_SECONDS = 2
_COPIED = ".copied"


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
    temporary.write_text(text)
    temporary.replace(path)


class LogCopier:
    """Copies what logs have grown by. How far it is stands beside them, for the next one."""

    def __init__(self, logs: Path, target: Path) -> None:
        self._logs, self._target = logs, target
        self._turn = threading.Lock()
        self._copied: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            self._copied = json.loads((logs / _COPIED).read_text())

    def watch(self) -> None:
        """Copy for ever."""
        while True:
            self.copy()
            time.sleep(_LOOK_SECONDS)

    def copy(self) -> str:
        """Copy what there is. Returns why not all of it could be copied, empty if it could."""
        with self._turn:
            before, trouble = dict(self._copied), ""
            try:
                for entry in os.scandir(self._logs):
                    if not entry.name.startswith("."):
                        self._copy(entry)
            except OSError as error:  # what is left stays, for the next time
                trouble = str(error)
            if self._copied != before:
                with contextlib.suppress(OSError):  # removed with all else of the node
                    replace(self._logs / _COPIED, json.dumps(self._copied))
            return trouble

    def _copy(self, entry: os.DirEntry[str]) -> None:
        start = self._copied.get(entry.name, 0)
        if entry.stat().st_size <= start:
            return
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
                log.seek(data)
                while piece := log.read(_PIECE_BYTES):
                    while piece:
                        written = os.write(target, piece)
                        self._copied[entry.name] = self._copied.get(entry.name, 0) + written
                        piece = piece[written:]
            finally:
                os.close(target)


def answer(request: dict[str, str], copier: LogCopier) -> tuple[str, str]:
    """Returns the text that a request asks for, and what went wrong."""
    try:
        if request["do"] == "copy":
            return "", copier.copy()
        path = Path(request["path"])
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
