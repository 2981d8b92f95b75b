"""The account of a run's time as its coordinator keeps it, for the result.

It is fed with the events that are written; those of earlier terms are read from their files, in a
thread that takes a small part of the processor for it: a coordinator that has just taken over has
more urgent things to do.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.coordinator.reporting.accounting import Account
from deadpool_megatron.events import Event, take_events

# Between two pauses so many events are read, which takes some milliseconds.
_AT_ONCE = 200
_PAUSE_SECONDS = 0.02
# So many new events are kept while earlier ones are read; above that there is no account.
_MOST_WAITING = 200_000


class LiveAccount:
    """Takes events in any thread; ``events``: the first event file of the run."""

    def __init__(self, events: Path, term: int) -> None:
        self._events, self._term = events, term
        self._account = Account()
        self._lock = threading.Lock()
        self._waiting: list[Event] | None = None
        self._hurry, self._is_read = threading.Event(), threading.Event()
        if term == 1:
            self._is_read.set()
        else:
            self._waiting = []
            threading.Thread(target=self._read, name="account", daemon=True).start()

    def add(self, event: Event) -> None:
        """Take in one event, in the order of the file."""
        with self._lock:
            if self._waiting is None:
                self._add(event)
            elif len(self._waiting) < _MOST_WAITING:
                self._waiting.append(event)

    def finish(self, limit_seconds: float) -> None:
        """Read what is left of earlier terms without pauses, for so long at most. Blocks."""
        self._hurry.set()
        self._is_read.wait(limit_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``deadpool report --json`` says of the same events: ``goodput`` and
        ``node_seconds``; both are None where earlier terms could not be read in time.
        """
        with self._lock:
            if self._waiting is not None:
                return {"goodput": None, "node_seconds": None}
            seconds = {use.value: spent for use, spent in self._account.seconds().items()}
            return {"goodput": self._account.goodput(), "node_seconds": seconds}

    def _add(self, event: Event) -> None:
        # A damaged event costs itself alone, as in the report.
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            self._account.add(event)

    def _read(self) -> None:
        known = 0

        def take(event: Event) -> None:
            nonlocal known
            known += 1
            if known % _AT_ONCE == 0:
                self._hurry.wait(_PAUSE_SECONDS)
            self._account.add(event)

        try:
            take_events(self._events, take, warn=lambda _: None, before_term=self._term)
        except OSError:
            return  # without them the account would be of another run
        with self._lock:
            waiting = self._waiting or []
            if len(waiting) < _MOST_WAITING:
                self._waiting = None
                for event in waiting:
                    self._add(event)
        self._is_read.set()
