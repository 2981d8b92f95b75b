"""Seals and commits, told in a line for all roles now and then: it is by far the most
that a run reports, and nobody reads it role by role. Pure.
"""

from __future__ import annotations

from deadpool_megatron.events import Event, Kind

KINDS = (Kind.SEALED, Kind.COMMITTED)
PERIOD_SECONDS = 10.0


class CommitDigest:
    """Collects SEALED and COMMITTED events; a seal tells nothing that its commit does not."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._began: float | None = None
        self._reports = self._released = self._bytes = 0
        self._epoch = self._iteration = 0
        self._wall_seconds = self._monotonic_seconds = 0.0
        self._roles: set[int | None] = set()
        self._ship_seconds: list[float] = []
        self._window_seconds: list[float] = []
        self._commit_seconds: list[float] = []

    def add(self, event: Event, now: float) -> Event | None:
        """Take one in; the line of the time that is over with it, if one is. ``now``: monotonic
        seconds. Raises KeyError, TypeError or ValueError for an event that is damaged.
        """
        if event.kind is not Kind.COMMITTED:
            return None
        data, nbytes = event.data, int(event.data.get("bytes", 0))
        ship, window = data.get("ship_seconds"), data.get("window_seconds")
        times = [float(s) for s in (ship,) if s is not None]
        windows = [float(s) for s in (window,) if s is not None]
        commits = [float(s) for s in (data.get("commit_seconds"),) if s is not None]
        self._began = now if self._began is None else self._began
        self._reports += 1
        self._released += bool(data.get("released"))
        self._bytes += nbytes
        self._epoch = max(self._epoch, event.epoch)
        self._iteration = max(self._iteration, event.iteration or 0)
        self._roles.add(event.role)
        self._wall_seconds = max(self._wall_seconds, event.wall_seconds)
        self._monotonic_seconds = max(self._monotonic_seconds, event.monotonic_seconds)
        self._ship_seconds = [max([*self._ship_seconds, *times])] if times else self._ship_seconds
        if windows:
            self._window_seconds = [min([*self._window_seconds, *windows])]
        if commits:
            self._commit_seconds = [max([*self._commit_seconds, *commits])]
        return self.take() if now - self._began >= PERIOD_SECONDS else None

    def take(self) -> Event | None:
        """The line of what was collected, if there is anything; the next one begins again."""
        if self._began is None:
            return None
        data = {
            "roles": len(self._roles),
            "reports": self._reports,
            "released": self._released,
            "bytes": self._bytes,
            "ship_seconds": next(iter(self._ship_seconds), None),
            "window_seconds": next(iter(self._window_seconds), None),
            "commit_seconds": next(iter(self._commit_seconds), None),
        }
        # The time of the newest commit, not of this line: it may be said much later.
        event = Event(
            Kind.COMMITTED,
            self._epoch,
            iteration=self._iteration,
            data=data,
            wall_seconds=self._wall_seconds,
            monotonic_seconds=self._monotonic_seconds,
        )
        self._begin()
        return event
