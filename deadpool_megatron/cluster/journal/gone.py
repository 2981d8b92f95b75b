"""Nodes that were given up since the newest record: the record that says so may come much later."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from deadpool_megatron.cluster.journal.entries import Journal, JournalError
from deadpool_megatron.layout.records import EpochRecord

_KIND = "gone"


def note(journal: Journal, node: int, cause: str) -> None:
    """For a successor. Without the note it waits for the node in vain, and goes on then: a journal
    that cannot be written just now is not tried again.
    """
    with contextlib.suppress(JournalError):
        journal.write(_KIND, node, {"cause": cause})


def numbers(journal: Journal) -> list[int]:
    """All nodes that were ever given up. Raises JournalError."""
    return journal.numbers(_KIND)


def since(journal: Journal, record: EpochRecord) -> Mapping[int, str]:
    """Nodes that were given up since the record, with the cause. Raises JournalError."""
    new = (node for node in numbers(journal) if node not in record.history.gone)
    return {node: str(journal.read(_KIND, node)["cause"]) for node in new}
