"""Typed events: the only source for logs, metrics, the timeline and tests.

An event is one line of JSON in ``events.jsonl`` of the run directory; the coordinator of term t > 1
writes ``events-<t>.jsonl`` beside it, and continues in ``events-<t>-<n>.jsonl`` when that is large.
A coordinator is the only writer of its files; other processes hand their events to it. Every event
carries its date, once for people (``at``) and once as a number (``wall_seconds``), both by the
coordinator's clock; the monotonic clock of its origin; the epoch, and where they apply the node,
role, iteration and phase.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from deadpool_megatron import ownership

# Of events.schema.json: goes up with each change of what an event means or may hold.
SCHEMA_VERSION = 5
# What a generation is judged by: numbers of the step that makes it, and the state that it saves.
LOSS, GRADIENT_NORM, STATE = "loss", "gradient norm", "optimizer state"


class Kind(StrEnum):
    """The kind of an event. ``events.schema.json`` says what each one means, and what ``data``
    holds."""

    RUN_STARTED = "run-started"
    COORDINATOR = "coordinator"
    NODE_JOINED = "node-joined"
    NODE_JUDGED = "node-judged"
    NODE_LOST = "node-lost"
    NODE_QUARANTINED = "node-aside"
    MEMBER_STARTED = "member-started"
    MEMBER_WARM = "member-warm"
    MEMBER_LOST = "member-lost"
    VAULT_STARTED = "vault-started"
    VAULT_LOST = "vault-lost"
    STACK = "stack"
    HANG = "hang"
    EPOCH_CLOSED = "epoch-closed"
    WAITING_FOR_SPARE = "waiting-for-spare"
    EPOCH_DECIDED = "epoch-decided"
    PROTECTION = "protection"
    EPOCH_OPENED = "epoch-opened"
    PHASE = "phase"
    RECOVERED = "recovered"
    TRAINING = "training"
    STEP = "step"
    NONFINITE = "nonfinite"
    AUDITED = "audited"
    AUDIT_FAILED = "audit-failed"
    SLOW_NODE = "slow-node"
    EVALUATION = "evaluation"
    SEGMENT = "segment"
    STATE_HASH = "state-hash"
    SEALED = "sealed"
    COMMITTED = "committed"
    REHEARSED = "rehearsed"
    REPLAYED = "replayed"
    EXPOSED = "exposed"
    GATE_WAIT = "gate-wait"
    CORRUPTION = "corruption"
    DECODED = "decoded"
    REFUSED = "refused"
    STALE_DIVERGENCE = "divergence"
    DURABLE = "durable"
    DUMPED = "dumped"
    DRAIN = "drain"
    LOG = "log"
    MEMBER_DONE = "member-done"
    RUN_ENDED = "run-ended"


@dataclass(frozen=True)
class Event:
    """One event; ``data`` holds JSON values only."""

    kind: Kind
    epoch: int = 0
    node: int | None = None
    role: int | None = None
    iteration: int | None = None
    phase: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    wall_seconds: float = field(default_factory=time.time)
    monotonic_seconds: float = field(default_factory=time.monotonic)

    def __deepcopy__(self, _: object) -> Event:
        return self  # nobody changes it

    def to_dict(self) -> dict[str, Any]:
        """JSON object without empty keys."""
        # Not by asdict(), which copies all data deeply: this is done for every event of a run.
        values = ((name, getattr(self, name)) for name in _FIELDS)
        return {name: value for name, value in values if value is not None and value != {}}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Event:
        """Inverse of :meth:`to_dict`. Raises KeyError, ValueError or TypeError for anything else:
        whoever reads events relies on the types of their fields.
        """
        given = {name: value for name, value in values.items() if name != "at"}
        event = Event(**{**given, "kind": Kind(values["kind"])})
        for name, types in _FIELD_TYPES.items():
            value = getattr(event, name)
            if not isinstance(value, types) or isinstance(value, bool):
                raise TypeError(f"event with {name} of type {type(value).__name__}")
        if not all(abs(at) < _END_OF_TIME for at in (event.wall_seconds, event.monotonic_seconds)):
            raise ValueError("event at no time")
        return event


_FIELD_TYPES: Mapping[str, Any] = {
    "epoch": int,
    "node": int | None,
    "role": int | None,
    "iteration": int | None,
    "phase": str | None,
    "data": dict,
    "wall_seconds": int | float,
    "monotonic_seconds": int | float,
}


def not_finite(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """The number of a step that is not finite, and its value in words: nan, inf or -inf.

    ``step``: the data of a STEP event. A skipped update is how loss scaling looks for its scale,
    and did no harm. Data of another kind has no such numbers.
    """
    if step.get("skipped"):
        return None
    for name, key in ((LOSS, "loss"), (GRADIENT_NORM, "grad_norm")):
        try:
            value = float.fromhex(step.get(key, ""))
        except (TypeError, ValueError, OverflowError):
            continue
        if not math.isfinite(value):
            return name, str(value)
    return None


_KINDS = frozenset(map(str, Kind))
_FIELDS = tuple(entry.name for entry in dataclasses.fields(Event))
# Another file begins when one is so long.
PART_BYTES = 64 << 20
_FILE = re.compile(r"(-(?P<term>\d{4,}))?(-(?P<part>\d{4,}))?")
# A follower reads so much of long files at a time.
_PIECE_BYTES = 16 << 20
# Seconds; what is beyond, or no number, would spoil every sum that it is part of.
_END_OF_TIME = 1e15
# What is raised by whoever takes in values that are not those that were written there, or that
# another version has written. An event that does costs itself alone.
DAMAGE = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)


def date(wall_seconds: float) -> str:
    """The time in ISO 8601, local, with its zone: ``2026-11-28T12:03:22.250+01:00``."""
    return datetime.fromtimestamp(wall_seconds).astimezone().isoformat(timespec="milliseconds")


def to_line(event: Event) -> bytes:
    """The event as it stands in a file."""
    values = {"at": date(event.wall_seconds), **event.to_dict()}
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


class EventLog:
    """The event files of one term, which this object alone writes; ``path``: of the first term. A
    file that has become large is followed by another one. Not thread-safe.
    """

    def __init__(self, path: Path, term: int = 1, part_bytes: int = PART_BYTES) -> None:
        self._path, self._term, self._part_bytes = path, term, part_bytes
        self._part = 1
        self._file = -1
        self._at_end_of_line = True

    def append(self, lines: bytes) -> int:
        """Append whole lines, or what is left of them; returns how many bytes are in the file (page
        cache). Raises OSError; the file is opened again at the next call then.
        """
        try:
            if self._file >= 0 and not os.fstat(self._file).st_nlink:
                self.close()  # it was removed
            if self._file < 0:
                self._open()
            elif self._at_end_of_line and os.fstat(self._file).st_size >= self._part_bytes:
                os.fsync(self._file)
                self.close()
                self._part += 1
                self._open()
            written = os.write(self._file, lines)
        except OSError:
            self.close()
            raise
        self._at_end_of_line = lines[written - 1 : written] == b"\n"
        return written

    def sync(self) -> None:
        """Make what was written durable, for a host that dies with what it has not sent to the
        server of a network file system; blocks. Raises OSError.
        """
        if self._file >= 0:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):  # of an earlier write; it is told there as well
                os.close(file)

    def _open(self) -> None:
        path = term_file(self._path, self._term, self._part)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def term_file(path: Path, term: int, part: int = 1) -> Path:
    """An event file of a term; ``path``: the first one of the first term, ``events.jsonl``."""
    if part > 1:
        return path.with_name(f"{path.stem}-{term:04d}-{part:04d}{path.suffix}")
    return path if term == 1 else path.with_name(f"{path.stem}-{term:04d}{path.suffix}")


def event_files(path: Path) -> list[Path]:
    """The event files so far, in order; ``path``: the first one of the first term."""
    found = {}
    for file in path.parent.glob(f"{path.stem}*{path.suffix}"):
        match = _FILE.fullmatch(file.stem.removeprefix(path.stem))
        if match is not None:
            found[int(match["term"] or 1), int(match["part"] or 1)] = file
    return [file for _, file in sorted(found.items())]


def parse_line(line: str | bytes) -> Event:
    """The event of one line. A kind that is not known here, as of a newer version, becomes a LOG
    event that shows it. Raises ValueError, KeyError or TypeError for what is no event.
    """
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    kind = values["kind"]
    if isinstance(kind, str) and kind not in _KINDS:
        shown = {"level": "info", "text": f"{kind}: {json.dumps(values.get('data', {}))}"}
        values = {**values, "kind": Kind.LOG, "data": shown}
    return Event.from_dict(values)


class EventTail:
    """Reads what was added to the events of a run since the last look. Not thread-safe.

    ``path``: of the first term's file, which need not exist yet. ``complain`` is told of what is
    left out: lines that are no events (a power failure may leave a hole in a file), and events that
    whoever takes them finds damaged.
    """

    def __init__(self, path: Path, complain: Callable[[str], None] = lambda text: None) -> None:
        self._path, self._complain = path, complain
        self._offsets: dict[Path, int] = {}

    def leave_out(self, all_but_bytes: int) -> None:
        """Leave out what is there already, but for whole lines in so many newest bytes. Raises
        OSError."""
        for path in reversed(event_files(self._path)):
            with os.fdopen(ownership.open_regular(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > all_but_bytes:
                    file.seek(size - all_but_bytes)
                    file.readline()  # the rest of a line
                    self._offsets[path] = file.tell()
            all_but_bytes = max(0, all_but_bytes - size)

    def poll(self) -> list[Event]:
        """New events in order, without waiting; a line that is not finished is left for later. Of
        long files one piece is read, the next one is for the next time. Raises OSError where a file
        cannot be read; what stands before it was handed over.
        """
        events, left = list[Event](), _PIECE_BYTES
        for path in event_files(self._path):
            try:
                found = self._added(path, left)
            except OSError:
                if events:
                    break
                raise
            for line in found[: found.rfind(b"\n") + 1].splitlines():
                try:
                    events.append(parse_line(line))
                except (ValueError, KeyError, TypeError) as error:
                    self._complain(f"{path}: a line is skipped: {type(error).__name__}: {error}")
            left -= len(found)
            if left <= 0:
                break  # a later file before the rest of this one would be out of order
        return events

    def feed(self, take: Callable[[Event], None]) -> None:
        """Hand all that is new to ``take``; an event that it finds damaged costs itself alone."""
        while events := self.poll():
            for event in events:
                try:
                    take(event)
                except DAMAGE as error:
                    what = f"{self._path}: an event ({event.kind}) is skipped"
                    self._complain(f"{what}: {type(error).__name__}: {error}")

    def _added(self, path: Path, most: int) -> bytes:
        offset = self._offsets.get(path, 0)
        with os.fdopen(ownership.open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size < offset:
                offset = 0  # another file: that one was removed
            file.seek(offset)
            found = file.read(most)
        self._offsets[path] = offset + found.rfind(b"\n") + 1
        return found


def read_events(path: Path) -> Iterator[Event]:
    """All events of a run in order of terms, one by one, nothing without any; lines that are none
    are named on standard error."""
    tail = EventTail(path, complain)
    while events := tail.poll():
        yield from events


def complain(text: str) -> None:
    """Say it on standard error."""
    print(f"deadpool: {text}", file=sys.stderr)
