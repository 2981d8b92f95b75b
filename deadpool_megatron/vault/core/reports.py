"""What a vault tells about its work: events, and counters that its status shows."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import Generation

log = logging.getLogger(__name__)
# Strangers must not be able to flood the event log: one event a second for each reason.
_REFUSAL_EVENT_SECONDS = 1.0
_MOST_REASONS = 200
_NUMBERS = re.compile(r"\d+")  # reasons that differ in nothing else are counted as one


class Reports:
    """Thread-safe. Its lock is a leaf: nothing else is locked while it is held.

    ``send`` takes events without waiting for anybody; ``epoch`` answers which one is open.
    """

    def __init__(self, node: int, send: Callable[[Event], None], epoch: Callable[[], int]) -> None:
        self.counters: Counter[str] = Counter()
        self._node = node
        self.send = send
        self._epoch = epoch
        self._lock = threading.Lock()
        self._refused: dict[str, float] = {}  # reason -> monotonic time of its newest event

    def emit(self, kind: Kind, role: int, generation: Generation, data: dict[str, Any]) -> None:
        """Send an event about a generation of a role."""
        self.send(
            Event(
                kind,
                epoch=self._epoch(),
                node=self._node,
                role=role,
                iteration=generation.iteration,
                data=data,
            )
        )

    def corruption(
        self, role: int, generation: Generation, name: str, where: str, expected: int, found: int
    ) -> None:
        """Report bytes that are not what they should be."""
        log.warning("corruption: role %d %s part %s in %s", role, generation, name, where)
        checksums = {"expected": f"{expected:016x}", "found": f"{found:016x}"}
        data = {"part": name, "where": where, **checksums}
        self.emit(Kind.CORRUPTION, role, generation, data)

    def refuse(self, why: str, **facts: object) -> None:
        """Count something that was not accepted, and report it at most once a second."""
        now, reason = time.monotonic(), _NUMBERS.sub("N", why)
        with self._lock:
            if reason not in self._refused and len(self._refused) >= _MOST_REASONS:
                reason = "another reason"
            self.counters[f"refused: {reason}"] += 1
            if now - self._refused.get(reason, -1e9) < _REFUSAL_EVENT_SECONDS:
                return
            self._refused[reason] = now
        log.warning("refused: %s %s", why, facts)
        data = {"why": why, **{key: str(value) for key, value in facts.items()}}
        self.send(Event(Kind.REFUSED, epoch=self._epoch(), node=self._node, data=data))
