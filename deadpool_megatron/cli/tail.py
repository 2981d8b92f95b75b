"""Following ``events.jsonl`` of a run that is still writing it."""

from __future__ import annotations

import json
from pathlib import Path

from deadpool_megatron.events import Event


class EventTail:
    """Reads what was added since the last look. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """``path`` need not exist yet."""
        self._path = path
        self._offset = 0

    def poll(self) -> list[Event]:
        """New events in order, without waiting; a line that is not finished is left for later.

        Raises ValueError, TypeError or KeyError for a line that is no event.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                found = file.read()
        except FileNotFoundError:
            return []
        whole = found[: found.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [Event.from_dict(json.loads(line)) for line in whole.splitlines()]
