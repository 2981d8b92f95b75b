"""A standby whose event loop is measured once it coordinates: ``watched.py FILE standby ...``.

FILE gets one line of JSON for each time that the loop was blocked: by one callback, or (``late``)
between the time at which a timer was due and its turn, which sums up all ready callbacks, and
threads that kept the interpreter's lock. On a shared machine a wait for a core is no fault of the
coordinator: only the time in which this process used the CPU counts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from deadpool_megatron.cli import main

# Shorter blocks are not reported.
_MIN_SECONDS = 0.01
_LOOK_SECONDS = 0.01
_FRAMES = 12

Clocks = tuple[float, float]


def _now() -> Clocks:
    return time.monotonic(), time.process_time()


def _between(first: Clocks, then: Clocks) -> float:
    return min(then[0] - first[0], then[1] - first[1])


class Watch:
    """Measures every callback, and a timer; a thread notes where a long one stands."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._began: Clocks | None = None
        self._where: list[str] = []
        self._collecting = _now()
        self._garbage: list[str] = []
        self._run = asyncio.Handle._run

    def begin(self) -> None:
        """Watch every loop of this process from here on."""
        watch, run = self, self._run
        gc.callbacks.append(self._note_garbage)

        def measured(handle: asyncio.Handle) -> None:
            watch._where, watch._garbage, watch._began = [], [], _now()
            run(handle)
            began, watch._began = watch._began, None
            watch._report("callback", began, watch._where + watch._garbage)

        asyncio.Handle._run = measured  # type: ignore[method-assign]
        main = threading.main_thread().ident
        threading.Thread(target=self._look, args=(main,), name="watch", daemon=True).start()
        server = asyncio.BaseEventLoop.run_forever

        def run_forever(loop: asyncio.BaseEventLoop) -> None:
            self._due(loop, _now())
            server(loop)

        asyncio.BaseEventLoop.run_forever = run_forever  # type: ignore[method-assign]

    def _due(self, loop: asyncio.BaseEventLoop, before: Clocks) -> None:
        # Use of the CPU before the timer was due does not count.
        late = time.monotonic() - before[0] - _LOOK_SECONDS
        used = time.process_time() - before[1]
        self._note("late", min(late, used), [])
        loop.call_later(_LOOK_SECONDS, self._due, loop, _now())

    def _note_garbage(self, phase: str, facts: dict[str, int]) -> None:
        # No other thread gets a turn meanwhile.
        if phase == "start":
            self._collecting = _now()
        elif (seconds := _between(self._collecting, _now())) > _MIN_SECONDS:
            where = f"in {threading.current_thread().name}, {seconds * 1000:.0f} ms"
            self._garbage = [f"garbage of generation {facts['generation']} {where}"]

    def _look(self, thread: int) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            if self._began is not None and _between(self._began, _now()) > _MIN_SECONDS:
                stack = traceback.extract_stack(sys._current_frames()[thread])[-_FRAMES:]
                self._where = [f"{Path(frame.filename).name}:{frame.name}" for frame in stack]

    def _report(self, kind: str, began: Clocks, where: list[str]) -> None:
        self._note(kind, _between(began, _now()), where)

    def _note(self, kind: str, seconds: float, where: list[str]) -> None:
        if seconds >= _MIN_SECONDS:
            line: dict[str, Any] = {"at": time.time(), "what": kind, "seconds": seconds}
            os.write(self._file, json.dumps({**line, "where": where}).encode() + b"\n")


if __name__ == "__main__":
    Watch(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)).begin()
    del sys.argv[1]
    sys.exit(main())
