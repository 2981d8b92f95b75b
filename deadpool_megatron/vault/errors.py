"""The errors of a vault, on which its callers can act; its counters and events."""

from __future__ import annotations

import errno
import logging
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import Generation, is_parity_role

log = logging.getLogger(__name__)
_SHORTAGES = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# Raised by values of the wrong type or size; an infinite "integer" overflows.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error)
# Unauthenticated peers must not flood the event log: each reason has at most an event a second.
_REFUSAL_EVENT_SECONDS = 1.0
_MAX_REASONS = 200
_NUMBERS = re.compile(r"\d+")  # reasons that differ only in numbers are counted together


def is_shortage(error: Exception) -> bool:
    """Return whether an error is a passing shortage of processes, descriptors or memory, which
    proves nothing about a file or a disk."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


class Code(StrEnum):
    """The kind of a VaultError, as it is sent to another process."""

    FAILED = "failed"
    TOO_LATE = "too-late"  # a later iteration is available
    NO_SHARED_MEMORY = "no-room"
    CANNOT_CUT = "cannot-cut"


class Refusal(StrEnum):
    """Reasons for a vault to refuse a request of another vault."""

    EARLY = "early"  # the epoch, or a slot, does not exist yet: ask again soon
    WAITED = "waited"  # other roles have not sent their parts yet: ask again at once
    SUPERSEDED = "superseded"  # a newer generation of the role is here: counts as received
    NOT_HELD = "not held"
    STALE = "stale"  # the epoch is over
    NO_SHARED_MEMORY = "no copy possible"
    NO_BLOCK_POSSIBLE = "no parity block possible"
    WRONG_SENDER = "sender has no such role"
    WRONG_ITERATION = "impossible iteration"
    WRONG_LINEAGE = "abandoned lineage"
    WRONG_LAYOUT = "layout"
    WRONG_PART = "unknown or oversized part"
    WRONG_BLOCK = "no such parity block"
    WRONG_HOLDER = "parity block of another node"
    WRONG_BLOCK_PART = "unknown part of a parity block"
    OTHER_BYTES = "other bytes than a sealed parity block was made of"


# Refusals of normal operation, which are not reported.
NORMAL_REFUSALS = frozenset({Refusal.EARLY, Refusal.WAITED, Refusal.SUPERSEDED, Refusal.NOT_HELD})


class VaultError(Exception):
    """A failed request to a vault: one line for people."""

    code = Code.FAILED

    @staticmethod
    def of(code: str, text: str) -> VaultError:
        """Return the error that another process has sent as a code and a text."""
        kinds: dict[str, type[VaultError]] = {
            Code.TOO_LATE: TooLate,
            Code.NO_SHARED_MEMORY: OutOfSpace,
            Code.CANNOT_CUT: CutRefused,
        }
        return kinds.get(code, VaultError)(text)


class TooLate(VaultError):
    """The generation has been overwritten."""

    code = Code.TOO_LATE


class OutOfSpace(VaultError):
    """No memory for a slot: the file system is full, or the node's limit is reached."""

    code = Code.NO_SHARED_MEMORY


class CutRefused(VaultError):
    """A role cannot be cut from the roles of another size although their parts are intact: memory
    is short, or the parts belong to other parameters."""

    code = Code.CANNOT_CUT


class Refused(VaultError):
    """A request between vaults that was refused. ``about``: details for people."""

    def __init__(self, reason: Refusal, about: str = "") -> None:
        self.reason = reason
        self.about = about
        super().__init__(f"{reason}: {about}" if about else str(reason))

    @staticmethod
    def in_answer(answer: Mapping[str, Any]) -> Refused | None:
        """Return the refusal in an answer, if any. Raises ValueError for an unknown reason,
        KeyError for a refusal without a reason."""
        if answer["t"] != "refused":
            return None
        return Refused(Refusal(answer["why"]), str(answer.get("about", "")))


class Frozen(VaultError):
    """The epoch has been closed: the member must not write into a slot, and has not written."""


class Interrupted(VaultError):
    """The interrupt descriptor became readable before the vault had an answer."""


class SegmentError(VaultError):
    """The file is no segment of this version, or was truncated or damaged."""


class DamagedSegment(SegmentError):
    """The file is of this version, but its description does not match its checksum any more."""

    def __init__(self, text: str, expected: int, found: int) -> None:
        super().__init__(text)
        self.expected = expected
        self.found = found


class RestoreUnavailable(VaultError):
    """A part could not be produced from any source.

    ``tried`` holds one ``(node, role, reason)`` for each source, in the order they were tried.
    """

    def __init__(self, part: str, tried: tuple[tuple[int, int, str], ...]) -> None:
        self.part = part
        self.tried = tried
        listing = "; ".join(
            f"{'parity' if is_parity_role(role) else f'role {role}'} on node {node}: {reason}"
            for node, role, reason in tried
        )
        super().__init__(f"part {part} cannot be restored: {listing or 'no source is listed'}")


class VaultReports:
    """Counters and events of a vault. Thread-safe; its lock is a leaf: nothing else is locked while
    it is held.

    ``send`` takes events and never waits; ``epoch``: the open epoch, or 0.
    """

    def __init__(self, node: int, send: Callable[[Event], None]) -> None:
        self.counters: Counter[str] = Counter()
        self._node = node
        self.send = send
        self.epoch = 0
        self._lock = threading.Lock()
        self._reported: dict[str, float] = {}  # reason -> monotonic time of its newest event

    def emit(self, kind: Kind, role: int, generation: Generation, data: dict[str, Any]) -> None:
        """Send an event about a generation of a role."""
        self.send(Event(kind, self.epoch, self._node, role, generation.iteration, data=data))

    def corruption(
        self, role: int, generation: Generation, name: str, where: str, expected: int, found: int
    ) -> None:
        """Count and report corrupt bytes."""
        self.counters["corruption"] += 1
        log.warning("corruption: role %d %s part %s in %s", role, generation, name, where)
        checksums = {"expected": f"{expected:016x}", "found": f"{found:016x}"}
        data = {"part": name, "where": where, **checksums}
        self.emit(Kind.CORRUPTION, role, generation, data)

    def warn(self, text: str) -> None:
        """Have a warning printed with the run's own messages."""
        self.send(Event(Kind.LOG, node=self._node, data={"level": "warning", "text": text}))

    def refuse(self, text: str, **facts: object) -> None:
        """Count a refusal, and report each reason at most once a second."""
        now, reason = time.monotonic(), _NUMBERS.sub("N", text)
        with self._lock:
            if reason not in self._reported and len(self._reported) >= _MAX_REASONS:
                reason = "another reason"
            self.counters[f"refused: {reason}"] += 1
            if now - self._reported.get(reason, -1e9) < _REFUSAL_EVENT_SECONDS:
                return
            self._reported[reason] = now
        log.warning("refused: %s %s", text, facts)
        data = {"why": text, **{key: str(value) for key, value in facts.items()}}
        self.send(Event(Kind.REFUSED, epoch=self.epoch, node=self._node, data=data))
