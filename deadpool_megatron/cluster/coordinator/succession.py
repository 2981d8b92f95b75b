"""The succession of coordinators: what each begins with, and the sign of life that it shows."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deadpool_megatron.cluster.journal.journal import (
    Journal,
    JournalError,
    gone_since,
    wrong_since,
)
from deadpool_megatron.cluster.journal.terms import Rhythm, Term, has_begun_after, newest_term, sign
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.process.liveness import Glance
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunInfo,
    read_valid,
)
from deadpool_megatron.layout.records import EpochRecord, Restore

Valid = tuple[Restore, ...]
# A takeover does not wait longer for a run directory that hangs.
_DURABLE_SECONDS = 1.0


@dataclass(frozen=True)
class Estate:
    """Inheritance of a coordinator, as far as it was read before its term was claimed: the newest
    record, and the valid checkpoints. ``is_durable_read``: whether these could be read; if not, the
    coordinator learns of them as soon as the run directory answers.
    """

    record: EpochRecord | None = None
    valid: Valid = ()
    is_durable_read: bool = True


@dataclass(frozen=True)
class CoordinatorOptions:
    """``listener`` is a bound and listening TCP socket; ``host`` the address agents reach it by;
    ``term`` was claimed by the caller, who gives up its journal to the coordinator.
    ``estate``: what was read before that. ``restarted``: all processes of the run had ended before;
    ``begins_anew``: with the command and settings of a new start, in which nothing has been decided
    yet.
    """

    run: RunDirectory
    info: RunInfo
    secret: bytes
    host: str
    listener: socket.socket
    term: Term
    journal: Journal
    estate: Estate
    restarted: bool = False
    begins_anew: bool = False


def look_up(journal: Journal, durable: Glance[Valid], known: EpochRecord | None = None) -> Estate:
    """Read it; ``known``: a record that was read before. Raises JournalError, or OSError."""
    record = newest_record(journal, known)
    try:
        return Estate(record, durable.look(_DURABLE_SECONDS))
    except TimeoutError:
        return Estate(record, is_durable_read=False)
    except ValueError as error:
        raise JournalError(str(error)) from error


def newest_record(journal: Journal, known: EpochRecord | None = None) -> EpochRecord | None:
    """The newest record, read only if it is another one than ``known``. Raises JournalError."""
    numbers = journal.numbers("epoch")
    if not numbers or (known is not None and known.epoch == numbers[-1]):
        return known
    return EpochRecord.from_dict(journal.read("epoch", numbers[-1]))


def begin(
    machine: Machine, journal: Journal, estate: Estate, on_trouble: Callable[[str], None]
) -> None:
    """Have the machine take over what the journal says. The term is claimed: no record is written
    any more but by a coordinator that had begun before, whose record is found here. What is read
    takes the same time however old the run is. ``on_trouble(text)``: for each note on a node that
    is not understood. Raises JournalError for a journal that does not work.
    """
    record = newest_record(journal, estate.record)
    if record is None:
        return
    gone, wrong = record.history.gone, record.history.wrong
    lost = gone_since(journal, gone, on_trouble)
    found = wrong_since(journal, wrong, on_trouble)
    machine.take_over(record, estate.valid, gone=lost, wrong=found)


def valid_checkpoints(run: RunDirectory) -> Valid:
    """The checkpoints that were made valid, the newest first. May take as long as it takes. Raises
    OSError, and ValueError when the file is damaged.
    """
    if not run.latest.exists():
        return ()
    # A run that ended before its first iteration says so; that is nothing to fall back to.
    return tuple(one for one in read_valid(run.latest) if one.kind != "initial")


class SignOfLife:
    """Writes the sign and looks, in a thread of its own: a network file system may hang. Nothing
    else is done in that thread, so that nothing but the journal itself can hold the sign up.

    ``is_heard()``: whether enough agents are heard. A coordinator that is cut off from most agents
    withholds its sign: else they would all fence themselves, and nobody would take over.
    ``on_gap(now)``: the sign stood still for so long that standbys and agents may have taken the
    coordinator for gone.
    ``on_newer(why)``: another one has taken over. ``on_trouble(text)``: the journal cannot be
    reached; once for each text.
    """

    def __init__(
        self,
        journal: Journal,
        term: int,
        rhythm: Rhythm,
        is_heard: Callable[[], bool],
        on_gap: Callable[[float], None],
        on_newer: Callable[[str], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._journal = journal
        self._term = term
        self._rhythm = rhythm
        self._is_heard = is_heard
        self._on_gap = on_gap
        self._on_newer = on_newer
        self._on_trouble = on_trouble
        self._count = 0
        self._written_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sign-of-life")

    def is_fresh(self, now: float) -> bool:
        """Return whether readers have seen the sign move all the time: only then may a silence
        count."""
        return now - self._written_at <= self._rhythm.gap

    async def run(self) -> None:
        """Until cancelled, or until another one has taken over."""
        loop = asyncio.get_running_loop()
        known = ""
        while True:
            show = self._is_heard()
            trouble = "" if show else "more than half of the agents are silent at once"
            try:
                is_followed = await loop.run_in_executor(self._thread, self._once, show)
            except (JournalError, OSError) as error:
                trouble = str(error)
            else:
                if show:
                    self._shown(time.monotonic())
                if is_followed:
                    self._on_newer(f"term {self._term + 1} has begun")
                    return  # whatever else was found says nothing more
            if trouble and trouble != known:
                self._on_trouble(f"{trouble}; nothing is decided until that is over")
            known = trouble
            await asyncio.sleep(self._rhythm.beat)

    def _shown(self, now: float) -> None:
        if not self.is_fresh(now):
            self._on_gap(now)
        self._written_at = now

    def look(self) -> int:
        """The newest term, from a list of all, asked right now from the calling thread: for what no
        other coordinator may do as well. Raises JournalError.
        """
        found = newest_term(self._journal)
        return self._term if found is None else found.number

    def close(self) -> None:
        """Stop the thread, without waiting for a look that hangs."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _once(self, show: bool) -> bool:
        """Returns whether a newer term has begun; else the sign moves, if it is to be shown."""
        self._count += 1
        is_followed = has_begun_after(self._journal, self._term)
        if show and not is_followed:
            self._journal.beat(sign(self._term, self._count))
        return is_followed
