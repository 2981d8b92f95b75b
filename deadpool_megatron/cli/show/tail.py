"""Following the events of a run that is still writing them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from deadpool_megatron import ownership
from deadpool_megatron.events import DAMAGE, Event, event_files, parse_line

_PIECE_BYTES = 64 << 20


class EventTail:
    """Reads what was added since the last look. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """``path``: of the first term's file, which need not exist yet."""
        self._path = path
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """New events in order, without waiting; a line that is not finished is left for later, one
        that is no event is left out. Of long files one piece is read, the next one is for the next
        time. Raises OSError where a file cannot be read; what stands before it was handed over.
        """
        events, left = list[Event](), _PIECE_BYTES
        for path in event_files(self._path):
            try:
                found = self._added(path, left)
            except OSError:
                if events:
                    break
                raise
            events += _events(found[: found.rfind(b"\n") + 1])
            left -= len(found)
            if left <= 0:
                break  # a later file before the rest of this one would be out of order
        return events

    def feed(self, take: Callable[[Event], None]) -> None:
        """Hand all that is new to ``take``; an event that it finds damaged costs itself alone."""
        while events := self.poll():
            for event in events:
                with contextlib.suppress(*DAMAGE):
                    take(event)

    def _added(self, path: Path, most: int) -> bytes:
        offset = self._offsets.get(path, 0)
        with os.fdopen(ownership.open_regular(path), "rb") as file:
            file.seek(offset)
            found = file.read(most)
        self._offsets[path] = offset + found.rfind(b"\n") + 1
        return found


def _events(lines: bytes) -> Iterator[Event]:
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            yield parse_line(line)
