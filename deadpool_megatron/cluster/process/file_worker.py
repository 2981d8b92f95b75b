"""A process that does file operations one after the other, for one that must not hang with them.

Reads one request per line of standard input, a JSON object, and answers each with a line. Only the
standard library is imported, so that it starts at once (see files.py).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def size(path: Path) -> int:
    """Returns the bytes of a file; 0 without one."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


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


def main() -> None:
    """Until the end of standard input."""
    for line in sys.stdin:
        request = json.loads(line)
        path, text, error = Path(request["path"]), "", ""
        try:
            if request["do"] == "size":
                text = str(size(path))
            elif request["do"] == "read":
                text = read(path, int(request["start"]), int(request["nbytes"]))
            else:
                replace(path, request["text"])
        except OSError as trouble:
            error = str(trouble)
        print(json.dumps({"text": text, "error": error}), flush=True)


if __name__ == "__main__":
    main()
