"""Typed events: the only source for logs, metrics, the timeline and tests.

An event is one line of JSON in ``events.jsonl`` of the run directory; the coordinator of term t > 1
writes ``events-<t>.jsonl`` beside it, and goes on in ``events-<t>-<n>.jsonl`` when that is large. A
coordinator is the only writer of its files; other processes hand their events to it. Every event
carries the wall clock (comparable between hosts, as far as clocks agree) and the monotonic clock
(comparable within one host), the epoch, and where they apply the node, role, iteration and phase.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Kind(StrEnum):
    """What happened. The comment says which keys ``data`` holds."""

    RUN_STARTED = "run-started"  # roles, nodes, spares, command
    COORDINATOR = "coordinator"  # term, host, hostname: who coordinates from now on, on which node
    NODE_JOINED = "node-joined"  # host, spare
    # standing (good, weak, left out), reasons, facts, domain, links (what it found about others),
    # sent, received (bytes per second) and clock_seconds, as far as they were measured
    NODE_JUDGED = "node-judged"
    NODE_LOST = "node-lost"  # cause, kind
    NODE_ASIDE = "node-aside"  # cause, kind: its roles go to a spare, it stays as the last spare
    MEMBER_STARTED = "member-started"  # slot, incarnation, pid
    MEMBER_WARM = "member-warm"  # slot, incarnation, seconds
    # slot, incarnation, cause, exit_code or signal; kind unless it was killed on purpose
    MEMBER_LOST = "member-lost"
    VAULT_STARTED = "vault-started"  # pid, slots_found
    VAULT_LOST = "vault-lost"  # cause
    # slot, incarnation, log, frames (of the main thread, innermost first), threads, missing (why
    # there are none): where a process that hung or was frozen stood before it was killed
    STACK = "stack"
    EPOCH_CLOSED = "epoch-closed"  # cause, kind (a FailureKind)
    # generation, segment, changes, seconds; after a loss that was not finite also forgotten_from:
    # the iteration from which on all numbers reported so far do not count
    EPOCH_DECIDED = "epoch-decided"
    # old, new (plans in words), why, every (cadence), survives (lost nodes), most_lost (iterations
    # computed again after a failure, at most)
    PROTECTION = "protection"
    EPOCH_OPENED = "epoch-opened"  # every role restored; phases: seconds of each
    PHASE = "phase"  # phase, seconds: one member's part of a recovery
    RECOVERED = "recovered"  # cause, kind, phases, steps_recomputed, seconds, exposed_seconds
    STEP = "step"  # loss, grad_norm, learning_rate (hexadecimal floats), skipped, samples
    NONFINITE = "nonfinite"  # loss (nan, inf, -inf), policy (stop or rollback)
    # per iteration without waiting: seconds of its slowest role, peer_seconds (median), factor;
    # over: it is as fast as its peers again
    SLOW_NODE = "slow-node"
    EVALUATION = "evaluation"  # loss (hexadecimal float)
    SEGMENT = "segment"  # boundary (evaluation, save, ...), seconds: what role 0 did between steps
    STATE_HASH = "state-hash"  # sha256
    SEALED = "sealed"  # lineage, parts; of a vault, not in the files of a run
    # Of a vault: lineage, boundary, released, bytes, ship_seconds, window_seconds, commit_seconds
    # (from the seal on). In the files of a run one for all roles, of some seconds: how many roles,
    # reports, released and bytes, the longest ship_seconds and commit_seconds, the shortest
    # window_seconds; its iteration is the newest.
    COMMITTED = "committed"
    # matched, difference, seconds, bytes: whether a replay of a role's first update gave its bytes
    REHEARSED = "rehearsed"
    REPLAYED = "replayed"  # steps, seconds, matched: a role was restored by recomputing updates
    EXPOSED = "exposed"  # seconds without the wanted copies, until re-protected
    # seconds; reported while it lasts and at its end (over). In the files of a run its end is told
    # for all roles of an iteration: roles, seconds of all, longest_seconds; of the role that waited
    # longest.
    GATE_WAIT = "gate-wait"
    GATE_RELEASED = "gate-released"  # role runs with fewer copies for now
    CORRUPTION = "corruption"  # where, expected, found
    # part, bytes, seconds, blocks: number -> [node, role]; a lost part was computed from parity
    DECODED = "decoded"
    REFUSED = "refused"  # who, why: a message, connection, seal or commit that was not accepted
    STALE_DIVERGENCE = "divergence"  # a replayed step gave other numbers than the first time
    DURABLE = "durable"  # path: a durable checkpoint became valid
    DUMPED = "dumped"  # path, generation: vaults wrote the common generation to disk
    DRAIN = "drain"  # node asked to leave
    LOG = "log"  # level, text: a line for people
    MEMBER_DONE = "member-done"  # sha256, samples
    RUN_ENDED = "run-ended"  # exit_status, reason, kind


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
        event = Event(**{**values, "kind": Kind(values["kind"])})
        for name, types in _FIELD_TYPES.items():
            value = getattr(event, name)
            if not isinstance(value, types) or isinstance(value, bool):
                raise TypeError(f"event with {name} of type {type(value).__name__}")
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


_KINDS = frozenset(map(str, Kind))
_FIELDS = tuple(entry.name for entry in dataclasses.fields(Event))
# Another file begins when one is so long.
PART_BYTES = 64 << 20
_FILE = re.compile(r"(-(?P<term>\d{4,}))?(-(?P<part>\d{4,}))?")
# So many lines that are no events are named one by one.
_WARNINGS = 5


def to_line(event: Event) -> bytes:
    """The event as it stands in a file."""
    return json.dumps(event.to_dict(), separators=(",", ":")).encode() + b"\n"


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


def event_files(path: Path, before_term: int | None = None) -> list[Path]:
    """The event files of all terms so far, or of those before one, in order; ``path``: the first
    one of the first term.
    """
    found = {}
    for file in path.parent.glob(f"{path.stem}*{path.suffix}"):
        match = _FILE.fullmatch(file.stem.removeprefix(path.stem))
        if match is not None:
            term = int(match["term"] or 1)
            if before_term is None or term < before_term:
                found[term, int(match["part"] or 1)] = file
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


def take_events(
    path: Path,
    take: Callable[[Event], None],
    warn: Callable[[str], None] | None = None,
    before_term: int | None = None,
) -> None:
    """Hand over the events of a run in order of terms, nothing without any; ``path``: of the first
    term's file; ``before_term``: only those of earlier terms. What is no event, or what ``take``
    raises ValueError, KeyError, TypeError or AttributeError for, is skipped and told to ``warn``
    (by default on standard error): a power failure may leave a hole in a file. The last line of a
    writer that was killed may be torn, and is left out without a word.
    """
    skipped = 0
    for file in event_files(path, before_term):
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break  # being written: its rest, read now, would look like a line of its own
                try:
                    take(parse_line(line))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    skipped += 1
                    if skipped <= _WARNINGS:
                        why = f"{type(error).__name__}: {error}"
                        (warn or _complain)(f"{file}, line {number} is skipped: {why}")
    if skipped > _WARNINGS:
        (warn or _complain)(f"{path.parent}: {skipped - _WARNINGS} more lines are skipped")


def read_events(path: Path) -> Iterator[Event]:
    """The same as :func:`take_events`, one by one."""
    for file in event_files(path):
        with open(file, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    yield parse_line(line)
                except (ValueError, KeyError, TypeError) as error:
                    _complain(f"{file}: a line is skipped: {type(error).__name__}: {error}")


def _complain(text: str) -> None:
    print(f"deadpool: {text}", file=sys.stderr)
