"""The account of a run's time as its coordinator keeps it, for the result.

It is fed with the events that are written. For the coordinator after this one its state is kept in
``account.json``, with the place in the events up to which it goes: that one reads it, and the few
events behind it, however old the run is. It is output like the events, which no decision looks at;
``deadpool report`` makes the same account of all events again.

The files are read and written in a thread of their own, which takes a small part of the processor:
a coordinator that has just taken over has more urgent things to do, and the run directory may hang.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.run_directory.directory import read_json, write_json
from deadpool_megatron.events import DAMAGE, Event, Place, files_behind, parse_line
from deadpool_megatron.observe.account import Account

_KEEP_SECONDS = 60.0
# More than is written between two states that are kept, by far; what is behind an older one, or
# without any, is not read.
_MOST_BYTES = 4 << 20
# Between two pauses so many events are read, which takes some milliseconds.
_AT_ONCE = 200
_PAUSE_SECONDS = 0.02
# So many new events are kept while earlier ones are read; above that there is no account.
_MOST_WAITING = 20_000


class LiveAccount:
    """Takes events in any thread; ``events``: the first event file of the run. An account that
    lacks events of earlier terms is none, and is not kept: the next coordinator may have more luck
    with what is there.
    """

    def __init__(self, events: Path, term: int) -> None:
        self._events, self._term = events, term
        self._path = events.with_name("account.json")
        self._changed = threading.Condition()
        self._account: Account | None = Account()
        self._waiting: list[Event] | None = None if term == 1 else []
        self._keep_at = 0.0
        self._to_keep: dict[str, Any] | None = None
        self._is_closing = False
        self._hurry, self._is_read = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="account", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Take in one event, in the order of the file."""
        with self._changed:
            if self._waiting is None:
                _add(self._account, event)
            elif len(self._waiting) < _MOST_WAITING:
                self._waiting.append(event)
            else:
                self._waiting = self._account = None

    def keep(self, nbytes: int, *, at_once: bool = False) -> None:
        """Have the account kept for the next coordinator, if that was not done a moment ago.
        ``nbytes``: of the lines of this term whose events were added. Does not block.
        """
        with self._changed:
            is_due = at_once or time.monotonic() >= self._keep_at
            if self._waiting is None and self._account is not None and is_due:
                self._keep_at = time.monotonic() + _KEEP_SECONDS
                place = asdict(Place(self._term, nbytes))
                self._to_keep = {"place": place, "account": self._account.to_dict()}
                self._changed.notify()

    def finish(self, limit_seconds: float) -> None:
        """Read what is left of earlier terms without pauses, for so long at most. Blocks."""
        self._hurry.set()
        self._is_read.wait(limit_seconds)

    def close(self, limit_seconds: float) -> None:
        """Write what is to be kept, for so long at most; a thread that hangs is left to the end of
        this process."""
        self._hurry.set()
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_seconds)

    def hand_over(self) -> None:
        """Keep nothing any more: the next coordinator does, from here on."""
        with self._changed:
            self._waiting = self._account = self._to_keep = None

    def to_dict(self) -> dict[str, Any]:
        """Return what ``deadpool report --json`` says of the same events: ``goodput`` and
        ``node_seconds``; both are None where it is not complete: those of earlier terms could not
        be read, or not in time.
        """
        with self._changed:
            if self._waiting is not None or self._account is None:
                return {"goodput": None, "node_seconds": None}
            seconds = {use.value: spent for use, spent in self._account.uses().items()}
            return {"goodput": self._account.goodput(), "node_seconds": seconds}

    def _work(self) -> None:
        if self._term > 1:
            found = self._read()
            with self._changed:
                waiting, self._waiting = self._waiting, None
                # None waits where there were too many.
                self._account = None if waiting is None else found
                for event in waiting or ():
                    _add(self._account, event)
        self._is_read.set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_keep is not None or self._is_closing)
                kept, self._to_keep = self._to_keep, None
            if kept is None:
                return
            with contextlib.suppress(OSError):  # the event writer tells what is wrong
                write_json(self._path, kept)

    def _read(self) -> Account | None:
        """Return the account of all earlier terms; None where that would take too long."""
        account, place = Account(), Place()
        with contextlib.suppress(OSError, *DAMAGE):  # or its writer's host has died with it
            kept = read_json(self._path)
            there = Place(int(kept["place"]["term"]), int(kept["place"]["nbytes"]))
            account, place = Account.from_dict(kept["account"]), there
        try:
            files = files_behind(self._events, place, self._term)
            if sum(nbytes for _, _, nbytes in files) > _MOST_BYTES:
                return None
            for file, begin, nbytes in files:
                self._read_file(account, file, begin, nbytes)
        except OSError:
            return None
        return account

    def _read_file(self, account: Account, file: Path, begin: int, nbytes: int) -> None:
        with open(file, "rb") as opened:
            opened.seek(begin)
            lines = opened.read(nbytes).splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return  # of a writer that was killed
            with contextlib.suppress(*DAMAGE):
                _add(account, parse_line(line))
            if number % _AT_ONCE == 0:
                self._hurry.wait(_PAUSE_SECONDS)


def _add(account: Account | None, event: Event) -> None:
    # A damaged event costs itself alone, as in the report.
    with contextlib.suppress(*DAMAGE):
        if account is not None:
            account.take(event)
