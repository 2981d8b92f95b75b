"""Following the events of a run that is still writing them."""

from __future__ import annotations

import json
from pathlib import Path

from deadpool_megatron.events import Event, event_files


class EventTail:
    """Reads what was added since the last look. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """``path``: of the first term's file, which need not exist yet."""
        self._path = path
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """New events in order, without waiting; a line that is not finished is left for later.

        Raises ValueError, TypeError or KeyError for a line that is no event.
        """
        return [event for path in event_files(self._path) for event in self._added(path)]

    def _added(self, path: Path) -> list[Event]:
        offset = self._offsets.get(path, 0)
        with open(path, "rb") as file:
            file.seek(offset)
            found = file.read()
        whole = found[: found.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        return [Event.from_dict(json.loads(line)) for line in whole.splitlines()]
