"""The terms of coordinators: numbered terms in the journal, and when the next one may be claimed.

A term is claimed by writing its entry, which only one process can. Nothing more is needed for
safety: a coordinator decides by writing an epoch record, which is write-once as well, and every
coordinator that takes over reads the newest record first. So an old coordinator that wakes up can
at most win a record that the new one then finds. Liveness is judged by the sign of life in the
journal.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cluster.journal.journal import Journal, JournalError
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.forms import read, write

_KIND = "term"


@dataclass(frozen=True)
class Term:
    """One coordinator's time: its number and where it listens. ``node``: beside which agent it
    runs, None where it belongs to no node.
    """

    number: int
    host: str
    port: int
    node: int | None
    hostname: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, as for a socket."""
        return self.host, self.port

    def to_dict(self) -> dict[str, Any]:
        """JSON form; the number is the entry's name."""
        return {name: value for name, value in write(self).items() if name != "number"}

    @staticmethod
    def from_dict(number: int, values: Mapping[str, Any]) -> Term:
        """Inverse of :meth:`to_dict`. Raises KeyError, TypeError or ValueError."""
        return read(Term, {**values, "number": number})


def newest_term(journal: Journal, known: Term | None = None) -> Term | None:
    """The term that holds now; read only if it is not ``known``. Raises JournalError."""
    numbers = journal.numbers(_KIND)
    if not numbers or (known is not None and known.number == numbers[-1]):
        return known
    return Term.from_dict(numbers[-1], journal.read(_KIND, numbers[-1]))


def sign(term: int, count: int) -> str:
    """The sign of life of a term's coordinator: each time with another count, 0 at the claim."""
    return f"{term} {count}"


def term_of(beat: str) -> int:
    """The term that a sign of life names; 0 before the first one, and for what is none."""
    named = beat.partition(" ")[0]
    return int(named) if named.isascii() and named.isdigit() else 0


def has_begun_after(journal: Journal, term: int) -> bool:
    """Return whether a term newer than ``term``, which there is, has begun. Raises JournalError.

    No entries are listed, so that this costs the same however old the run is, and nothing is found
    later than by a list. A term is claimed under the number behind the newest that its claimant
    finds in a list, and one that has missed some loses the race for a number that is taken: so
    there is no newer term without ``term`` + 1, whose entry is asked for by its name. On a network
    file system this host may have noted that there is none, as long as it may keep a list; so the
    sign of life is read first, whose file is asked for at the server each time. Who claims a term
    writes it at once, and again in each beat, if the old coordinator has written in between.
    """
    return term_of(journal.last_beat()) > term or journal.has(_KIND, term + 1)


def look(journal: Journal, known: Term | None) -> tuple[Term | None, str]:
    """Returns the term that the sign of life names, and the sign; ``known``: what the look before
    has found. Every node looks, for as long as the run lives: so the sign alone is read, and no
    entries are listed. Who claims a term says so by the sign at once. Raises JournalError.
    """
    beat = journal.last_beat()
    named = term_of(beat)
    if known is None:
        known = newest_term(journal)
    elif named > known.number:
        known = Term.from_dict(named, journal.read(_KIND, named))
    return known, beat


def claim_term(journal: Journal, number: int, host: str, port: int, node: int | None) -> Term:
    """Become the coordinator of this term. Raises LostRace when another one has it, JournalError.

    ``host`` and ``port``: where this process already listens, as agents connect at once.
    """
    term = Term(number, host, port, node, socket.gethostname(), os.getpid())
    journal.write(_KIND, number, term.to_dict())
    return term


@dataclass(frozen=True)
class HeartbeatTiming:
    """The times of the sign of life, in seconds, all derived from the limit of the fence.

    ``beat``: from one to the next, and from look to look. ``gap``: after a longer one of its own a
    coordinator trusts none of its silences. ``stall``: a reader takes the coordinator for gone.
    ``alone``: a coordinator that has not heard most agents for so long withholds its sign; then
    alone + beat + stall + beat is less than the limit of the fence, so that nobody is fenced.
    Safe because gap + beat < stall: who takes it for gone has seen a gap that it will notice too.
    """

    beat: float
    gap: float
    stall: float
    alone: float

    @staticmethod
    def of(settings: Settings) -> HeartbeatTiming:
        """With the default fence limit of 3.2 s: 0.27, 0.53, 1.07 and 1.07 s."""
        beat = settings.fence_seconds / 12
        return HeartbeatTiming(beat, 2 * beat, 4 * beat, 4 * beat)


class SignOfLife:
    """Writes the sign and looks, in a thread of its own: a network file system may hang. Nothing
    else is done in that thread, so that nothing but the journal itself can hold the sign up.

    ``is_reachable()``: whether enough agents are in contact. A coordinator that is cut off from
    most agents stops its heartbeat, so that a standby takes over before all agents fence
    themselves.
    ``on_gap(now)``: the sign stood still for so long that standbys and agents may have taken the
    coordinator for gone.
    ``on_newer(why)``: another one has taken over. ``on_trouble(text)``: the journal cannot be
    reached; once for each text.
    """

    def __init__(
        self,
        journal: Journal,
        term: int,
        rhythm: HeartbeatTiming,
        is_reachable: Callable[[], bool],
        on_gap: Callable[[float], None],
        on_newer: Callable[[str], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._journal = journal
        self._term = term
        self._rhythm = rhythm
        self._is_heard = is_reachable
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
                    now = time.monotonic()
                    if not self.is_fresh(now):
                        self._on_gap(now)
                    self._written_at = now
                if is_followed:
                    self._on_newer(f"term {self._term + 1} has begun")
                    return  # whatever else was found says nothing more
            if trouble and trouble != known:
                self._on_trouble(f"{trouble}; nothing is decided until that is over")
            known = trouble
            await asyncio.sleep(self._rhythm.beat)

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


# Before the first record spares may still be starting: training nodes let so many turns pass.
_TURNS_FOR_SPARES = 10


def claim_order(
    record: EpochRecord | None, nodes: int, spares: int, node: int, coordinator: int | None = None
) -> int:
    """Returns how many others may claim before ``node``: spares come first, so that the coordinator
    is on no training node where there is a choice, and of them the highest number, which gets a
    role last. ``nodes`` and ``spares``: as the run was ordered. ``coordinator``: the node of the
    one that is to be followed. It comes last: its host may be what failed.
    """
    if record is None:
        if node >= nodes:
            return max(0, nodes + spares - 1 - node)
        return nodes - 1 - node + (spares + _TURNS_FOR_SPARES if spares else 0)
    ready = {n for n, address in record.nodes.items() if address.spare}
    everybody = [*sorted(ready, reverse=True), *sorted(record.nodes.keys() - ready, reverse=True)]
    everybody.sort(key=lambda other: other == coordinator)
    return everybody.index(node) if node in everybody else len(everybody)


class Succession:
    """The moment when a standby may claim the next term. Pure of I/O; times are monotonic seconds.

    ``order``: see :func:`claim_order`; each place further back waits one ``stall`` longer. Two
    standbys may learn of the same sign of life with less than that between them, so the first in
    order claims. Terms up to ``ended`` (0: there were none) have no coordinator any more: the next
    one is claimed as soon as its turn has come, each place 2 x ``beat`` later. What could not be
    looked at proves nothing: after a journal that hung or failed everything counts again.
    """

    def __init__(
        self, rhythm: HeartbeatTiming, silence_seconds: float, now: float, *, ended: int = 0
    ) -> None:
        self._rhythm = rhythm
        self._ended = ended
        self._silence_seconds = silence_seconds
        self._mark: tuple[int, str] = (0, "")
        self._changed_at = now
        self._seen_at = now

    def look(self, term: int, beat: str, began: float, ended: float) -> None:
        """Take what the journal said, in a look from ``began`` to ``ended``."""
        blind_seconds, self._seen_at = ended - self._seen_at, ended
        if (term, beat) != self._mark:
            self._mark = (term, beat)
            self._changed_at = began
        if blind_seconds > 3 * self._rhythm.stall:
            self._changed_at = ended

    def is_stale(self, now: float) -> bool:
        """Return whether it is time to knock at the coordinator's door."""
        return now - self._changed_at >= self._rhythm.stall - self._rhythm.beat

    def may_claim(self, order: int, refused: bool, now: float, *, in_touch: bool = False) -> bool:
        """``refused``: nobody listens any more where the coordinator did. ``in_touch``: the own
        agent still hears the coordinator. If it is cut off from the others, so is this node, and
        those others come first.
        """
        waited = now - self._changed_at
        if self._mark[0] <= self._ended:
            return waited >= 2 * self._rhythm.beat * order
        still = waited - self._rhythm.stall * order
        if refused and self.is_stale(now):
            return still >= 0
        return still >= (2 if in_touch else 1) * self._silence_seconds
