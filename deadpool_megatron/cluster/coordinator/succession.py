"""The succession of coordinators: the state from which a new coordinator starts."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from deadpool_megatron.cluster.journal.journal import (
    QUARANTINED,
    REMOVED,
    SIZES,
    Journal,
    JournalError,
    read_notes,
)
from deadpool_megatron.cluster.journal.terms import Term
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.file_systems import TimedRead
from deadpool_megatron.layout.records import EpochRecord, Restore

Valid = tuple[Restore, ...]
# A takeover does not wait longer for a run directory that hangs.
_DURABLE_SECONDS = 1.0


@dataclass(frozen=True)
class RecoveredState:
    """State that a coordinator reads before its term is claimed: the newest record and the valid
    checkpoints. ``is_durable_read``: whether the checkpoints could be read; if not, the coordinator
    reads them as soon as the run directory answers.
    """

    record: EpochRecord | None = None
    valid: Valid = ()
    is_durable_read: bool = True


@dataclass(frozen=True)
class CoordinatorOptions:
    """Options: ``listener`` is a bound and listening TCP socket; ``host`` the address at which
    agents reach it; ``term`` was claimed by the caller, which must not use ``journal`` any more.
    ``recovered``: the state that was read before. ``restarted``: all processes of the run had ended
    before; ``has_new_command``: the run was started again with a new command and new settings, and
    no decision has been made since.
    """

    run: RunDirectory
    info: RunInfo
    secret: bytes
    host: str
    listener: socket.socket
    term: Term
    journal: Journal
    recovered: RecoveredState
    restarted: bool = False
    has_new_command: bool = False


def look_up(
    journal: Journal, durable: TimedRead[Valid], known: EpochRecord | None = None
) -> RecoveredState:
    """Read the newest record and the checkpoints; ``known``, a record read before, avoids a second
    read. Raises JournalError, or OSError."""
    record = newest_record(journal, known)
    try:
        return RecoveredState(record, durable.look(_DURABLE_SECONDS))
    except TimeoutError:
        return RecoveredState(record, is_durable_read=False)
    except ValueError as error:
        raise JournalError(str(error)) from error


def newest_record(journal: Journal, known: EpochRecord | None = None) -> EpochRecord | None:
    """Return the newest record, read only if it differs from ``known``. Raises JournalError."""
    numbers = journal.numbers("epoch")
    if not numbers or (known is not None and known.epoch == numbers[-1]):
        return known
    entry = journal.read("epoch", numbers[-1])
    if journal.has(SIZES, numbers[-1]):
        entry["history"] |= journal.read(SIZES, numbers[-1])
    return EpochRecord.from_dict(entry)


def begin(
    machine: Machine, journal: Journal, recovered: RecoveredState, on_trouble: Callable[[str], None]
) -> None:
    """Make the machine take over the journal's state. The term is claimed already, so an earlier
    coordinator can only finish the write of a record that it had begun, and that record is found
    here. The read takes the same time for a run of any age. ``on_trouble(text)`` is called for each
    note on a node that is not understood. Raises JournalError for a failing journal.
    """
    record = newest_record(journal, recovered.record)
    if record is None:
        return
    history = record.history
    unknown = "was given up (its note in the journal is not understood)"
    removed = read_notes(journal, (REMOVED, "cause"), history.removed, unknown, on_trouble)
    # Node -> its host, if no node of that host gets a role again, else an empty text.
    quarantined = read_notes(journal, (QUARANTINED, "host"), history.quarantined, "", on_trouble)
    machine.take_over(record, recovered.valid, removed=removed, quarantined=quarantined)


def valid_checkpoints(run: RunDirectory) -> Valid:
    """Return the valid checkpoints, the newest first. May block without limit. Raises OSError, and
    ValueError if the file is damaged.
    """
    if not run.latest.exists():
        return ()
    # A run that ended before its first iteration has an entry of kind initial, no checkpoint.
    return tuple(entry for entry in run_files.read_valid(run.latest) if entry.kind != "initial")
