"""Salvage of what a run that is over has left in memory of this host: it is dumped.

Nodes that were lost to a run because their agents died may be alive, with slots that nobody has
removed. Together with what healthy nodes wrote when the run ended they can be a whole generation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from deadpool_megatron.cluster.journal.journal import open_journal
from deadpool_megatron.cluster.run_directory.cleanup import node_directories, remove_segments
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.cluster.run_directory.slots import NodeTaken, claim, end_leftovers
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.vault.disk.dump import dump_kept
from deadpool_megatron.vault.errors import SegmentError


def last_history(run: RunDirectory, info: RunInfo) -> History:
    """Return what the newest record of a run says of it: among others the kept line, lineage ->
    last iteration that was not abandoned. Raises JournalError."""
    journal = open_journal(info.settings, info.run_id, run.journal)
    newest = journal.newest("epoch")
    return History() if newest is None else EpochRecord.from_dict(newest[1]).history


def salvage(run: RunDirectory, info: RunInfo, kept: Mapping[int, int]) -> list[str]:
    """Write what lies on the kept line in directories without a live agent; returns the files.

    What was written leaves the memory. Raises VaultError with one line when it cannot be written,
    or is not understood: then its directory stays, and the others have been written.
    """
    written, unread = [], []
    for directory in node_directories(info.run_id):
        number = directory.name.removeprefix("node")
        if not number.isdigit() or not any(directory.glob("*.seg")):
            continue
        try:
            lock = claim(directory, int(number))
        except (NodeTaken, FileNotFoundError):
            continue
        try:
            end_leftovers(run, info.run_id, int(number), directory)
            written += dump_kept(int(number), directory, info.settings, kept, run.dump)
            remove_segments(directory)
        except SegmentError as error:
            unread.append(str(error))
        finally:
            os.close(lock)
    if unread:
        raise SegmentError("; ".join(unread))
    return written
