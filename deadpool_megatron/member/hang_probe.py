"""Evidence for heartbeats: the groups for which a stalled member waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from deadpool_megatron.comms import Communicators

# The time without progress before the flight recorder is read, and the interval from then on.
_STALLED_SECONDS = 1.0


class HangProbe:
    """Evidence about the groups of a stalled member, to find the culprit. Watcher thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._progress = -1
        self._since = 0.0
        self._evidence: dict[str, Any] = {}

    def evidence(self, communicators: Communicators) -> Mapping[str, Any]:
        """Return additional fields of a heartbeat; empty while the process makes progress.

        ``begun``: for each group in which the host itself waits, the counts of collectives and of
        messages that it has begun. ``device``: for each group whose operations run on a device, the
        numbers of the enqueued, started and completed operations, and whether all operations are
        collectives.
        """
        progress, now = communicators.progress(), self._now()
        if progress != self._progress:
            self._progress, self._since, self._evidence = progress, now, {}
        elif now - self._since >= _STALLED_SECONDS:
            self._since = now
            begun = [
                [group, counts.collectives, counts.messages]
                for group, counts in sorted(communicators.operation_counts().items())
            ]
            self._evidence = {**self._evidence, "begun": begun}
            found = None
            # The recorder of another version of torch gives no evidence, which the heartbeat then
            # lacks.
            with contextlib.suppress(ValueError, AttributeError, RuntimeError):
                communicators.report_faults()
                found = communicators.positions()
            if found is not None:
                self._evidence["device"] = [
                    [group, at.enqueued, at.started, at.completed, at.collective]
                    for group, at in sorted(found.items())
                ]
        return self._evidence
