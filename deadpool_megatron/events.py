"""Typed events: the only source for logs, metrics, the timeline and tests.

An event is a line of JSON in ``events.jsonl`` of the run directory. The coordinator of term t > 1
writes ``events-<t>.jsonl`` next to it, and continues in ``events-<t>-<n>.jsonl`` when that file is
large. A coordinator is the only writer of its files; other processes send it their events.

Each event has its date by the coordinator's clock, as text for people (``at``) and as a number
(``wall_seconds``); the time by the monotonic clock of its origin; the epoch; and the node, role,
iteration and phase, if they apply.
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

# The version of events.schema.json, which grows with each change of an event's meaning or content.
SCHEMA_VERSION = 6
# Names of the values of a generation that are checked to be finite.
LOSS, GRADIENT_NORM, STATE = "loss", "gradient norm", "optimizer state"


class Kind(StrEnum):
    """The kind of an event; ``events.schema.json`` has its meaning and the content of ``data``."""

    RUN_STARTED = "run-started"
    COORDINATOR = "coordinator"
    NODE_JOINED = "node-joined"
    NODE_JUDGED = "node-judged"
    NODE_LOST = "node-lost"
    NODE_QUARANTINED = "node-quarantined"
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
    SIZE = "size"
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
    """An event. ``data``: JSON values only."""

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
        return self  # an event is immutable

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object without empty keys."""
        # asdict() would copy all data deeply, for every event of a run.
        values = ((name, getattr(self, name)) for name in _FIELDS)
        return {name: value for name, value in values if value is not None and value != {}}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Event:
        """Return the event of a JSON object, the inverse of :meth:`to_dict`.

        Raises KeyError, ValueError or TypeError for another object, as readers rely on the types
        of the fields.
        """
        fields = {name: value for name, value in values.items() if name != "at"}
        event = Event(**{**fields, "kind": Kind(values["kind"])})
        for name, types in _FIELD_TYPES.items():
            value = getattr(event, name)
            if not isinstance(value, types) or isinstance(value, bool):
                raise TypeError(f"event with {name} of type {type(value).__name__}")
        if not all(abs(at) < _MAX_SECONDS for at in (event.wall_seconds, event.monotonic_seconds)):
            raise ValueError("event at no time")
        return event


_FIELD_TYPES: Mapping[str, Any] = {
    "epoch": int,
    "data": dict,
    "phase": str | None,
    **dict.fromkeys(("node", "role", "iteration"), int | None),
    **dict.fromkeys(("wall_seconds", "monotonic_seconds"), int | float),
}


def not_finite(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name of a number of a step that is not finite, and its value (nan, inf or -inf);
    None if all numbers are finite.

    ``step``: the data of a STEP event. The numbers of a skipped update do not count, as loss
    scaling finds its scale by such updates. Data of another kind has no such numbers.
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
# An event file that has this size is followed by another file.
PART_BYTES = 64 << 20
_FILE = re.compile(r"(-(?P<term>\d{4,}))?(-(?P<part>\d{4,}))?")
# A reader reads at most this much at a time.
_PIECE_BYTES = 16 << 20
# A larger time, or NaN, would spoil every sum.
_MAX_SECONDS = 1e15
# Errors of reading values that are damaged or of another version. Only their event is lost.
DAMAGE = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)


def date(wall_seconds: float) -> str:
    """Return the time in ISO 8601, local, with its zone: ``2026-11-28T12:03:22.250+01:00``."""
    return datetime.fromtimestamp(wall_seconds).astimezone().isoformat(timespec="milliseconds")


def to_line(event: Event) -> bytes:
    """Return the line of the event in a file."""
    values = {"at": date(event.wall_seconds), **event.to_dict()}
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


class EventLog:
    """The event files of a term, of which this object is the only writer. ``path``: the file of the
    first term. A large file is followed by another file. Not thread-safe.
    """

    def __init__(self, path: Path, term: int = 1, part_bytes: int = PART_BYTES) -> None:
        self._path, self._term, self._part_bytes = path, term, part_bytes
        self._part = 1
        self._file = -1
        self._at_end_of_line = True

    def append(self, lines: bytes) -> int:
        """Append whole lines, or the bytes of lines that an earlier call did not write. Return the
        number of bytes written (to the page cache). Raises OSError; the next call then opens the
        file again.
        """
        try:
            if self._file >= 0 and not os.fstat(self._file).st_nlink:
                self.close()  # the file was removed
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
        """Make written events durable: otherwise they are lost if the host dies before it has sent
        them to the server of a network file system. Blocks. Raises OSError.
        """
        if self._file >= 0:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):  # an earlier write has reported the error
                os.close(file)

    def _open(self) -> None:
        path = term_file(self._path, self._term, self._part)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def term_file(path: Path, term: int, part: int = 1) -> Path:
    """Return an event file of a term; ``path``: the file of the first term, ``events.jsonl``."""
    if part > 1:
        return path.with_name(f"{path.stem}-{term:04d}-{part:04d}{path.suffix}")
    return path if term == 1 else path.with_name(f"{path.stem}-{term:04d}{path.suffix}")


def event_files(path: Path) -> list[Path]:
    """Return the existing event files, in order; ``path``: the file of the first term."""
    files = {}
    for file in path.parent.glob(f"{path.stem}*{path.suffix}"):
        match = _FILE.fullmatch(file.stem.removeprefix(path.stem))
        if match is not None:
            files[int(match["term"] or 1), int(match["part"] or 1)] = file
    return [file for _, file in sorted(files.items())]


def parse_line(line: str | bytes) -> Event:
    """Return the event of a line. An event of an unknown kind, as of a newer version, becomes a LOG
    event that shows it. Raises ValueError, KeyError or TypeError for a line that is no event.
    """
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    kind = values["kind"]
    if isinstance(kind, str) and kind not in _KINDS:
        data = {"level": "info", "text": f"{kind}: {json.dumps(values.get('data', {}))}"}
        values = {**values, "kind": Kind.LOG, "data": data}
    return Event.from_dict(values)


class EventTail:
    """A reader of the new events of a run. Not thread-safe.

    ``path``: the file of the first term, which need not exist yet. ``complain`` gets a text for
    each line that is skipped because it is no event (a power failure may leave a hole in a file),
    and for each event that its receiver finds damaged.
    """

    def __init__(self, path: Path, complain: Callable[[str], None] = lambda text: None) -> None:
        self._path, self._complain = path, complain
        self._offsets: dict[Path, int] = {}

    def skip_all_but(self, newest_bytes: int) -> None:
        """Skip all present events except those in the ``newest_bytes`` of the files. Raises
        OSError."""
        for path in reversed(event_files(self._path)):
            with os.fdopen(ownership.open_regular(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > newest_bytes:
                    file.seek(size - newest_bytes)
                    file.readline()  # the end of a line that begins before
                    self._offsets[path] = file.tell()
            newest_bytes = max(0, newest_bytes - size)

    def poll(self) -> list[Event]:
        """Return new events in order, without waiting, and without an unfinished line.

        A call reads at most a piece of long files. Raises OSError if a file cannot be read, once
        the events before it were returned.
        """
        events, max_bytes = list[Event](), _PIECE_BYTES
        for path in event_files(self._path):
            try:
                content = self._read_new(path, max_bytes)
            except OSError:
                if events:
                    break
                raise
            for line in content[: content.rfind(b"\n") + 1].splitlines():
                try:
                    events.append(parse_line(line))
                except (ValueError, KeyError, TypeError) as error:
                    self._complain(f"{path}: a line is skipped: {type(error).__name__}: {error}")
            max_bytes -= len(content)
            if max_bytes <= 0:
                break  # this file may have more events, which come before those of later files
        return events

    def feed(self, take: Callable[[Event], None]) -> None:
        """Call ``take`` with each new event. Skip an event for which it raises an error of
        :data:`DAMAGE`."""
        while events := self.poll():
            for event in events:
                try:
                    take(event)
                except DAMAGE as error:
                    text = f"{self._path}: an event ({event.kind}) is skipped"
                    self._complain(f"{text}: {type(error).__name__}: {error}")

    def _read_new(self, path: Path, max_bytes: int) -> bytes:
        """Return new bytes of a file, and move its offset to the end of the last whole line."""
        offset = self._offsets.get(path, 0)
        with os.fdopen(ownership.open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size < offset:
                offset = 0  # the file was removed, and this is another file
            file.seek(offset)
            content = file.read(max_bytes)
        self._offsets[path] = offset + content.rfind(b"\n") + 1
        return content


def read_events(path: Path) -> Iterator[Event]:
    """Yield all events of a run in the order of terms, and complain on standard error of lines that
    are no events."""
    tail = EventTail(path, complain)
    while events := tail.poll():
        yield from events


def complain(text: str) -> None:
    """Print a complaint to standard error."""
    print(f"deadpool: {text}", file=sys.stderr)
