"""The journal of a run after months, and its reads by all standbys."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import HeartbeatTiming, Term, look
from deadpool_megatron.events import Event, Kind, term_file, to_line
from deadpool_megatron.layout.history import NO_LIMIT, History
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.settings import Settings

EPOCHS = 10_000
EVENTS = 2_000_000
_LINEAGES = 1000
_LOST_NODES = 2000
_FIRST_LOST = 1_000_000
# As in the standby: with a reachable coordinator it reads at every eighth beat.
_CALM_BEATS = 8


def age(journal: Path, events: Path) -> int:
    """Make the journal of months from its single record, while there is no coordinator;
    return the number of its newest epoch."""
    entries = Journal(journal)
    record = EpochRecord.from_dict(entries.read("epoch", 1))
    first = journal / "epoch-00000001.json"
    for epoch in range(2, EPOCHS):
        os.link(first, journal / f"epoch-{epoch:08d}.json")
    lineages = range(EPOCHS - _LINEAGES, EPOCHS)
    lost = range(_FIRST_LOST, _FIRST_LOST + _LOST_NODES)
    history = History(
        kept={1: 0} | {lineage: lineage for lineage in lineages} | {EPOCHS: NO_LIMIT},
        removed=dict.fromkeys(lost, "connection closed"),
        recoveries=EPOCHS,
    )
    for node in lost:
        (journal / f"gone-{node:08d}.json").write_text('{"cause":"connection closed"}\n')
        (journal / f"node-{node:08d}.json").write_text("{}\n")
    entries.write("epoch", EPOCHS, replace(record, epoch=EPOCHS, history=history).to_dict())
    line = to_line(Event(Kind.COMMITTED, 1, 7, 11, 100, data={"lineage": 1, "bytes": 1 << 30}))
    block = line * 10_000
    with open(term_file(events, 1, 2), "wb") as file:
        for _ in range(EVENTS // 10_000):
            file.write(block)
    return EPOCHS


class Standbys(threading.Thread):
    """Reads of the journal by ``number`` standbys, at their pace. ``lost``: their agents have no
    coordinator. ``count`` and ``cpu_seconds`` sum up all reads so far."""

    def __init__(self, journal: Path, number: int, settings: Settings) -> None:
        super().__init__(daemon=True, name="standbys")
        self.lost = False
        self.count = 0
        self.cpu_seconds = 0.0
        self._journal = Journal(journal)
        self._number = number
        self._beat = HeartbeatTiming.of(settings).beat
        self._over = False

    def run(self) -> None:
        """Read until closed."""
        known: Term | None = None
        due = time.monotonic()
        while not self._over:
            known, _ = look(self._journal, known)
            self.count += 1
            self.cpu_seconds = time.thread_time()
            due += self._beat * (1 if self.lost else _CALM_BEATS) / self._number
            now = time.monotonic()
            # A standby that cannot keep up reads as often as it can.
            due = max(due, now - self._beat)
            if due > now:
                time.sleep(due - now)

    def close(self) -> None:
        """End the reads."""
        self._over = True
        self.join()
