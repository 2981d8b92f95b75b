#!/usr/bin/env python
"""A vault whose time is counted by thread and function: ``watched.py FILE ARGUMENTS OF A VAULT``.

A thread looks a hundred times a second at all others. The processor time that each has used since
the last look goes to the innermost function of the package on its stack, with the line that it
stands in. FILE is JSON, thread -> function -> seconds so far, replaced ten times a second.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

from deadpool_megatron.vault import __main__ as vault

_LOOK_SECONDS, _WRITE_LOOKS = 0.01, 10
_PACKAGE = "/deadpool_megatron/"
WATCH = "watch"


def place_of(frame: FrameType | None) -> str:
    """Return the innermost place of the package on a stack."""
    while frame is not None:
        code = frame.f_code
        if _PACKAGE in code.co_filename:
            file = code.co_filename.rpartition(_PACKAGE)[2]
            line = linecache.getline(code.co_filename, frame.f_lineno or 0).strip()
            return f"{file}:{code.co_name}: {line[:60]}"
        frame = frame.f_back
    return "outside"


def watch(file: Path) -> None:
    """Count until the process ends."""
    Path("/proc/thread-self/comm").write_text(WATCH)
    spent: dict[str, Counter[str]] = defaultdict(Counter)
    before: dict[int, float] = {}
    looks = 0
    while True:
        time.sleep(_LOOK_SECONDS)
        frames, looks = sys._current_frames(), looks + 1
        for thread in threading.enumerate():
            try:
                text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            except OSError:
                continue  # it has ended
            now, number = int(text.split()[0]) / 1e9, thread.native_id or 0
            used, before[number] = now - before.get(number, now), now
            if used and thread.name != WATCH:
                name = re.sub(r"\d+", "N", thread.name)
                spent[name][place_of(frames.get(thread.ident or 0))] += used
        if looks % _WRITE_LOOKS == 0:
            file.with_suffix(".new").write_text(json.dumps(spent))
            file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    threading.Thread(target=watch, args=(Path(sys.argv.pop(1)),), name=WATCH, daemon=True).start()
    sys.exit(vault.main())
