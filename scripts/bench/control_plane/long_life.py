"""The journal of a run after months."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.events import Event, Kind, term_file, to_line
from deadpool_megatron.layout.history import NO_LIMIT, History
from deadpool_megatron.layout.records import EpochRecord

EPOCHS = 10_000
EVENTS = 2_000_000
_LINEAGES = 1000
_LOST_NODES = 2000
_FIRST_LOST = 1_000_000


def age(journal: Path, events: Path) -> EpochRecord:
    """Make the journal of months from its single record, while there is no coordinator; return its
    newest record."""
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
    newest = replace(record, epoch=EPOCHS, history=history)
    entries.write("epoch", EPOCHS, newest.to_dict())
    line = to_line(Event(Kind.COMMITTED, 1, 7, 11, 100, data={"lineage": 1, "bytes": 1 << 30}))
    block = line * 10_000
    with open(term_file(events, 1, 2), "wb") as file:
        for _ in range(EVENTS // 10_000):
            file.write(block)
    return newest
