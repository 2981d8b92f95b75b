"""Writes events in a thread of its own: the run directory may hang, or be full, and nobody waits.

Events are output. Nothing is decided from them, and no coordinator reads what another one wrote; so
neither decisions nor the sign of life depend on how long a write or an fsync takes. What cannot be
written yet is kept in memory up to a limit, and written when the file system works again; what came
above the limit is counted, and told in one line then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from deadpool_megatron.events import Event, EventLog, Kind, to_line

_MOST_BYTES = 64 << 20
_BATCH_BYTES = 1 << 20
_SYNC_SECONDS = 1.0
_PAUSE_SECONDS = 0.5
# A write that takes longer is told of, like one that fails.
_LONG_SECONDS = 5.0


class EventWriter:
    """Takes events in any thread; see the module text."""

    def __init__(self, log: EventLog, most_bytes: int = _MOST_BYTES) -> None:
        self._log = log
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = self._accepted_bytes = 0
        self._in_hand = 0
        self._dropped = 0
        self._told = 0  # of those that were dropped
        self._failed_at: float | None = None
        self._why = ""
        self._busy_since: float | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="events", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Have an event written, or drop it when too much waits already. Does not block."""
        line = to_line(event)
        with self._changed:
            if self._bytes + len(line) > self._most_bytes:
                self._dropped += 1
                return
            self._append(line)
            self._changed.notify()

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)
        self._accepted_bytes += len(line)

    @property
    def accepted_bytes(self) -> int:
        """Of all lines so far: where the next one will stand in the files of this term."""
        with self._changed:
            return self._accepted_bytes

    def describe(self) -> dict[str, Any]:
        """For the status: ``waiting`` and ``dropped`` events, and what is wrong (``trouble``)."""
        with self._changed:
            return {
                "waiting": len(self._lines) + self._in_hand,
                "dropped": self._dropped,
                "trouble": self._trouble(time.monotonic()),
            }

    def close(self, limit_seconds: float) -> int:
        """Write the rest, for so long at most; returns how many events could not be written. A
        thread that hangs is left to the end of this process.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_seconds)
        with self._changed:
            return len(self._lines) + self._in_hand + self._dropped - self._told

    def _trouble(self, now: float) -> str:
        if self._failed_at is not None:
            return f"events cannot be written for {now - self._failed_at:.0f} s: {self._why}"
        if self._busy_since is not None and now - self._busy_since > _LONG_SECONDS:
            return f"a write of events has not returned for {now - self._busy_since:.0f} s"
        return ""

    def _work(self) -> None:
        rest, unsynced, synced_at = b"", False, time.monotonic()
        while True:
            rest = rest or self._next_batch(synced_at + _SYNC_SECONDS if unsynced else None)
            if not rest and not unsynced:
                break
            began = time.monotonic()
            try:
                while rest:
                    rest = rest[self._log.append(rest) :]
                    unsynced = True
                if time.monotonic() - synced_at >= _SYNC_SECONDS or self._is_closing:
                    self._log.sync()
                    unsynced, synced_at = False, time.monotonic()
            except OSError as error:
                self._fail(error, began)
                continue
            self._works_again(began)
        self._log.close()

    def _next_batch(self, until: float | None) -> bytes:
        """The next lines, as soon as there are some; nothing at the end, or at the time ``until``
        (monotonic seconds)."""
        with self._changed:
            while not self._lines and not self._is_closing:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            batch: list[bytes] = []
            size = 0
            while self._lines and size < _BATCH_BYTES:
                batch.append(self._lines.popleft())
                size += len(batch[-1])
            self._bytes -= size
            self._in_hand = len(batch)
            self._busy_since = time.monotonic()
            return b"".join(batch)

    def _fail(self, error: OSError, began: float) -> None:
        with self._changed:
            self._busy_since = None
            self._why = str(error.strerror or error)
            self._failed_at = began if self._failed_at is None else self._failed_at
            self._changed.wait_for(lambda: self._is_closing, _PAUSE_SECONDS)
        if self._is_closing:
            time.sleep(_PAUSE_SECONDS)

    def _works_again(self, began: float) -> None:
        now = time.monotonic()
        with self._changed:
            self._busy_since, self._in_hand = None, 0
            since = began if self._failed_at is None else self._failed_at
            why = self._why if self._failed_at is not None else "the file system did not answer"
            lost, self._told = self._dropped - self._told, self._dropped
            if self._failed_at is None and now - began < _LONG_SECONDS and not lost:
                return
            self._failed_at = None
            text = (
                f"events could not be written for {now - since:.0f} s: {why}; {lost} were dropped"
            )
            # Above the limit, if need be.
            self._append(to_line(Event(Kind.LOG, data={"level": "warning", "text": text})))
