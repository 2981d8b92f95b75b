"""The state a coordinator begins with: of a new run, or of the run that the journal tells of."""

from __future__ import annotations

from dataclasses import replace

from immutables import Map

from deadpool_megatron.cluster.coordinator.chronicle import Chronicle
from deadpool_megatron.cluster.journal.entries import Journal
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state import State
from deadpool_megatron.layout.records import EpochRecord, without_details


def first_state(machine: Machine, journal: Journal, chronicle: Chronicle, now: float) -> State:
    """``now``: monotonic seconds. Raises JournalError for a journal that does not work."""
    records = journal.entries("epoch")
    if not records:
        return machine.start(now)
    newest_epoch = max(records)
    kept = [
        EpochRecord.from_dict(values if epoch == newest_epoch else without_details(values))
        for epoch, values in sorted(records.items())
    ]
    durable = chronicle.newest_durable()
    state = machine.resume(kept, durable, now)
    newest = max(state.newest, chronicle.results.last_iteration)
    # Nobody waits for a node that was given up before.
    return replace(state, newest=newest, gone=Map(chronicle.results.lost_nodes))
