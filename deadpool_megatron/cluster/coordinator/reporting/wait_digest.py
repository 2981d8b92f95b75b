"""Waits at the gate, told in a line for all roles of an iteration: where copies are late, every
role waits in every iteration. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.coordinator.reporting.commit_digest import PERIOD_SECONDS
from deadpool_megatron.events import Event


class WaitDigest:
    """Collects GATE_WAIT events. A wait that lasts is told at once, of each iteration the first in
    a while: roles wait side by side.
    """

    def __init__(self) -> None:
        # By epoch and iteration: since when, monotonic seconds.
        self._ended: dict[tuple[int, int | None], tuple[float, Event]] = {}
        self._lasting: dict[tuple[int, int | None], float] = {}

    def add(self, event: Event, now: float) -> list[Event]:
        """Take one in; returns what is to be written now. ``now``: monotonic seconds. Raises
        KeyError, TypeError or ValueError for an event that is damaged.
        """
        key, seconds = (event.epoch, event.iteration), float(event.data["seconds"])
        if not event.data.get("over"):
            told = self._lasting.get(key)
            if told is not None and now - told < PERIOD_SECONDS:
                return []
            self._lasting = {key: now}
            return [event]
        began, known = self._ended.get(key, (now, None))
        longest, roles, total = event, 1, seconds
        if known is not None:
            longest = event if seconds > known.data["longest_seconds"] else known
            roles, total = known.data["roles"] + 1, known.data["seconds"] + seconds
            seconds = max(seconds, known.data["longest_seconds"])
        data = {"seconds": total, "longest_seconds": seconds, "roles": roles, "over": True}
        self._ended[key] = began, replace(longest, data=data)
        return self._take(now - PERIOD_SECONDS)

    def take(self) -> list[Event]:
        """The lines of what was collected; the next ones begin again."""
        return self._take(float("inf"))

    def _take(self, until: float) -> list[Event]:
        old = [key for key, (began, _) in self._ended.items() if began <= until]
        return [self._ended.pop(key)[1] for key in old]
