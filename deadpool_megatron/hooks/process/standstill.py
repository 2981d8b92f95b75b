"""What a member that makes no progress tells of its groups, for the search for a culprit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from deadpool_megatron.comms.inner import Begun, Position

# So long without progress, and so often from then on: the recorder is not asked while all is well.
_STILL_SECONDS = 1.0


class Watched(Protocol):
    """The communicators of the process."""

    def progress(self) -> int: ...
    def look(self) -> None: ...
    def positions(self) -> Mapping[str, Position] | None: ...
    def begun(self) -> Mapping[str, Begun]: ...


class Standstill:
    """Used by the watcher thread alone, which makes the beats."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._progress = -1
        self._since = 0.0
        self._told: dict[str, Any] = {}

    def look(self, communicators: Watched) -> Mapping[str, Any]:
        """Return what a beat says besides, once the process has stood still for a while:
        ``begun``, a group and the numbers of its collectives and messages that the host has begun,
        for each group in which the host itself waits; and ``device``, where operations run on one:
        a group, the numbers of its operations that were enqueued, started and completed, and
        whether they are collectives.
        """
        progress, now = communicators.progress(), self._now()
        if progress != self._progress:
            self._progress, self._since, self._told = progress, now, {}
        elif now - self._since >= _STILL_SECONDS:
            self._since = now
            begun = [
                [group, one.collectives, one.messages]
                for group, one in sorted(communicators.begun().items())
            ]
            self._told = {**self._told, "begun": begun}
            found = None
            # What the recorder of another version says is no evidence; the beat goes on.
            with contextlib.suppress(ValueError, AttributeError, RuntimeError):
                communicators.look()
                found = communicators.positions()
            if found is not None:
                self._told["device"] = [
                    [group, one.enqueued, one.started, one.completed, one.collective]
                    for group, one in sorted(found.items())
                ]
        return self._told
