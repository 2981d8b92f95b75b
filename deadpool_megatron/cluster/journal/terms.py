"""The terms of coordinators: their numbers in the journal, and when the next may be claimed.

A process claims a term by writing its entry, which only one process can do. Safety needs nothing
more: a coordinator decides by writing an epoch record, which is write-once as well, and every
coordinator that takes over reads the newest record first. So an old coordinator that wakes up can
at most write a record that the new coordinator then finds. Liveness is judged by the heartbeat in
the journal, the sign of life.
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
    """The period in which a process is the coordinator: its number and the process's address.
    ``node``: the node of the agent that started the process, None if it belongs to no node.
    """

    number: int
    host: str
    port: int
    node: int | None
    hostname: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port, as for a socket."""
        return self.host, self.port

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the number, which is in the entry's name."""
        return {name: value for name, value in write(self).items() if name != "number"}

    @staticmethod
    def from_dict(number: int, values: Mapping[str, Any]) -> Term:
        """Invert :meth:`to_dict`. Raises KeyError, TypeError or ValueError."""
        return read(Term, {**values, "number": number})


def newest_term(journal: Journal, known: Term | None = None) -> Term | None:
    """Return the newest term; read its entry only if it is not ``known``. Raises JournalError."""
    numbers = journal.numbers(_KIND)
    if not numbers or (known is not None and known.number == numbers[-1]):
        return known
    return Term.from_dict(numbers[-1], journal.read(_KIND, numbers[-1]))


def sign(term: int, count: int) -> str:
    """Return the sign of life of a term's coordinator; the count is 0 at the claim, then rises."""
    return f"{term} {count}"


def term_of(beat: str) -> int:
    """Return the term in a sign of life; 0 before the first sign, and for text that is no sign."""
    number = beat.partition(" ")[0]
    return int(number) if number.isascii() and number.isdigit() else 0


def has_begun_after(journal: Journal, term: int) -> bool:
    """Return whether a term newer than the existing ``term`` has begun. Raises JournalError.

    No entries are listed, so that the cost does not depend on the age of the run. A claimant takes
    the number after the newest in its list, and with an outdated list it loses the race for a
    number that is taken. So if there is a newer term, ``term`` + 1 has an entry, which is looked up
    by name. On a network file system this host may have cached the absence of that entry, as it may
    have cached a list. So the sign of life is read first, which comes from the server each time. A
    claimant writes the sign at once, and again in each beat, in case the old coordinator has
    overwritten it.
    """
    return term_of(journal.read_heartbeat()) > term or journal.has(_KIND, term + 1)


def look(journal: Journal, known: Term | None) -> tuple[Term | None, str]:
    """Return the term in the sign of life, and the sign. ``known``: the term of the last look.
    Every node looks during the whole run, so only the sign is read, and no entries are listed. That
    is enough, as a claimant writes the sign at once. Raises JournalError.
    """
    beat = journal.read_heartbeat()
    number = term_of(beat)
    if known is None:
        known = newest_term(journal)
    elif number > known.number:
        known = Term.from_dict(number, journal.read(_KIND, number))
    return known, beat


def claim_term(journal: Journal, number: int, host: str, port: int, node: int | None) -> Term:
    """Become the coordinator of this term. Raises LostRace if another process has it, and
    JournalError.

    ``host`` and ``port``: the address at which this process listens already, because agents connect
    at once.
    """
    term = Term(number, host, port, node, socket.gethostname(), os.getpid())
    journal.write(_KIND, number, term.to_dict())
    return term


@dataclass(frozen=True)
class HeartbeatTiming:
    """The times of the sign of life, in seconds, all derived from the limit of the fence.

    ``beat``: the period of signs and of looks. ``gap``: after a longer gap between its own signs, a
    coordinator concludes nothing from silence. ``stall``: the time until a reader assumes that the
    coordinator is dead. ``alone``: without reports of most agents for this time, a coordinator
    withholds its sign. As alone + beat + stall + beat is less than the limit of the fence, no node
    is fenced then. As gap + beat < stall, a coordinator that is assumed dead knows of its gap.
    """

    beat: float
    gap: float
    stall: float
    alone: float

    @staticmethod
    def of(settings: Settings) -> HeartbeatTiming:
        """Return the times: 0.27, 0.53, 1.07 and 1.07 s with the default fence limit of 3.2 s."""
        beat = settings.fence_seconds / 12
        return HeartbeatTiming(beat, 2 * beat, 4 * beat, 4 * beat)


@dataclass
class SignOfLife:
    """Writer of the sign of life, which also looks for newer terms. It has a thread of its own, as
    a network file system may hang. The thread does nothing else, so that only the journal can delay
    the sign.

    ``is_reachable()``: whether enough agents are connected. A coordinator that is cut off from most
    agents stops its heartbeat, so that a standby takes over before all agents fence themselves.
    ``on_gap(now)``: the sign was unchanged for so much time that standbys and agents may assume
    that the coordinator is dead. ``on_newer(reason)``: another coordinator has taken over.
    ``on_trouble(text)``: the journal cannot be reached, or most agents are silent; called once for
    equal texts in a row.
    """

    journal: Journal
    term: int
    rhythm: HeartbeatTiming
    is_reachable: Callable[[], bool]
    on_gap: Callable[[float], None]
    on_newer: Callable[[str], None]
    on_trouble: Callable[[str], None]

    def __post_init__(self) -> None:
        self._count = 0
        self._written_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sign-of-life")

    def is_fresh(self, now: float) -> bool:
        """Return whether the sign was written in time, without a gap. Only then does the silence of
        a node count."""
        return now - self._written_at <= self.rhythm.gap

    async def run(self) -> None:
        """Write the sign until cancelled, or until another coordinator has taken over."""
        loop = asyncio.get_running_loop()
        last_trouble = ""
        while True:
            show = self.is_reachable()
            trouble = "" if show else "more than half of the agents are silent at once"
            try:
                is_followed = await loop.run_in_executor(self._thread, self._once, show)
            except (JournalError, OSError) as error:
                trouble = str(error)
            else:
                if show:
                    now = time.monotonic()
                    if not self.is_fresh(now):
                        self.on_gap(now)
                    self._written_at = now
                if is_followed:
                    self.on_newer(f"term {self.term + 1} has begun")
                    return
            if trouble and trouble != last_trouble:
                self.on_trouble(f"{trouble}; nothing is decided until that is over")
            last_trouble = trouble
            await asyncio.sleep(self.rhythm.beat)

    def look(self) -> int:
        """Return the number of the newest term, from a new list of all terms, read in the calling
        thread: for acts that no other coordinator may repeat. Raises JournalError.
        """
        newest = newest_term(self.journal)
        return self.term if newest is None else newest.number

    def close(self) -> None:
        """Stop the thread, without waiting for a hanging look."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _once(self, show: bool) -> bool:
        """Return whether a newer term has begun; if not, change the sign, if it is to be shown."""
        self._count += 1
        is_followed = has_begun_after(self.journal, self.term)
        if show and not is_followed:
            self.journal.write_heartbeat(sign(self.term, self._count))
        return is_followed


# Before the first record spares may still be starting: training nodes wait this many turns longer.
_TURNS_FOR_SPARES = 10


def claim_order(
    record: EpochRecord | None, nodes: int, spares: int, node: int, coordinator: int | None = None
) -> int:
    """Return how many other nodes may claim before ``node``. Spares come first, so that the
    coordinator is not on a training node if possible. The first is the spare with the highest
    number, which gets a role last. ``nodes`` and ``spares``: their numbers at the start of the run.
    ``coordinator``: the node of the predecessor, which comes last, because its host may have
    failed.
    """
    if record is None:
        if node >= nodes:
            return max(0, nodes + spares - 1 - node)
        return nodes - 1 - node + (spares + _TURNS_FOR_SPARES if spares else 0)
    live_nodes = record.nodes
    candidates = sorted(live_nodes, key=lambda n: (n == coordinator, not live_nodes[n].spare, -n))
    return candidates.index(node) if node in candidates else len(candidates)


class Succession:
    """The moment when a standby may claim the next term. Pure of I/O; times are monotonic seconds.

    ``order``: see :func:`claim_order`; each later place waits one ``stall`` longer. The times at
    which two standbys see the same sign of life differ by less, so the first in order claims. Terms
    up to ``ended`` (0: none) are known to have no coordinator any more; then each place waits only
    2 x ``beat`` longer. A failed look proves nothing: after a journal that hung or failed, all
    times start again.
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
        """Take the result of a look at the journal, which lasted from ``began`` to ``ended``."""
        blind_seconds, self._seen_at = ended - self._seen_at, ended
        if (term, beat) != self._mark:
            self._mark = (term, beat)
            self._changed_at = began
        if blind_seconds > 3 * self._rhythm.stall:
            self._changed_at = ended

    def is_stale(self, now: float) -> bool:
        """Return whether the sign is old enough to try a connection to the coordinator."""
        return now - self._changed_at >= self._rhythm.stall - self._rhythm.beat

    def may_claim(self, order: int, refused: bool, now: float, *, in_touch: bool = False) -> bool:
        """Return whether the standby may claim. ``refused``: the coordinator's address refuses
        connections. ``in_touch``: this node's agent is connected to the coordinator. If the
        coordinator is cut off from other nodes, this node is too, so it lets others claim first.
        """
        waited = now - self._changed_at
        if self._mark[0] <= self._ended:
            return waited >= 2 * self._rhythm.beat * order
        still = waited - self._rhythm.stall * order
        if refused and self.is_stale(now):
            return still >= 0
        return still >= (2 if in_touch else 1) * self._silence_seconds
