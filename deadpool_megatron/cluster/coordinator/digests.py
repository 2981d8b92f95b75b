"""Seals, commits and waits at the gate, told in a line for all roles now and then: they are by far
the most that a run reports, and nobody reads them role by role. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.events import Event, Kind

KINDS = (Kind.SEALED, Kind.COMMITTED)
PERIOD_SECONDS = 10.0
# Of the times of a commit the one that is told.
_TOLD = {"ship_seconds": max, "window_seconds": min, "commit_seconds": max}


class CommitDigest:
    """Collects SEALED and COMMITTED events; a seal tells nothing that its commit does not."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._began: float | None = None
        self._roles: set[int | None] = set()
        self._counts = {"reports": 0, "released": 0, "bytes": 0}
        self._times: dict[str, float | None] = dict.fromkeys(_TOLD)
        self._newest = Event(Kind.COMMITTED, wall_seconds=0.0, monotonic_seconds=0.0)

    def add(self, event: Event, now: float) -> Event | None:
        """Take one in; the line of the time that is over with it, if one is. ``now``: monotonic
        seconds. Raises KeyError, TypeError or ValueError for an event that is damaged.
        """
        if event.kind is not Kind.COMMITTED:
            return None
        data, known = event.data, self._newest
        counts = {"reports": 1, "released": bool(data.get("released"))}
        counts["bytes"] = int(data.get("bytes", 0))
        for name, told in _TOLD.items():
            times = [float(s) for s in (self._times[name], data.get(name)) if s is not None]
            self._times[name] = told(times, default=None)
        self._began = now if self._began is None else self._began
        self._counts = {name: count + counts[name] for name, count in self._counts.items()}
        self._roles.add(event.role)
        # The time of the newest commit, not of the line: it may be said much later.
        self._newest = replace(
            known,
            epoch=max(known.epoch, event.epoch),
            iteration=max(known.iteration or 0, event.iteration or 0),
            wall_seconds=max(known.wall_seconds, event.wall_seconds),
            monotonic_seconds=max(known.monotonic_seconds, event.monotonic_seconds),
        )
        return self.take() if now - self._began >= PERIOD_SECONDS else None

    def take(self) -> Event | None:
        """The line of what was collected, if there is anything; the next one begins again."""
        if self._began is None:
            return None
        data = {"roles": len(self._roles), **self._counts, **self._times}
        event = replace(self._newest, data=data)
        self._begin()
        return event


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
