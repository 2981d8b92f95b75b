"""Traffic of a vault for protection, all shippers together: pace, limit, and how it fits.

Every sender of a generation's bytes opens a :class:`Flow` and takes them from it piece by piece.
Restores do not come here: while they continue the run stands, and no training traffic is in their
way.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core.interface import (
    Interface,
    LinkSpeed,
    LinkUse,
    Reading,
    Use,
    link_speed,
)
from deadpool_megatron.vault.core.pace import Allowed, Schedule, TokenBucket, Window, piece_bytes
from deadpool_megatron.vault.net.transport import Sent, begin_thread

log = logging.getLogger(__name__)

# Bounds what a lost wake-up could cost; the end of an epoch is seen as soon.
_LONGEST_WAIT_SECONDS = 0.1
_GIGABIT = 1_000_000_000
# What takes fewer bytes is over before it has a speed.
_TELLING_BYTES = 1 << 18
# Between two readings of the interface's counters, while copies wait for their pace.
_READ_SECONDS = 0.01
# Of the link, at most, while training sends and gaps are sure to come: there were some last time.
_PATIENT_SHARE = 0.05


@dataclass
class Fit:
    """The fit of shipping: seconds it took for the newest committed generation of a role, without
    what the pace held it back, those there are, and those from its seal to its commit (None: not
    known)."""

    ship_seconds: float = 0.0
    window_seconds: float | None = None
    commit_seconds: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """JSON form, as in events and in the vault's status."""
        return dataclasses.asdict(self)


@dataclass
class _Role:
    window: Window = field(default_factory=Window)
    # Seconds that each node took for its copy of a generation.
    shipped: dict[Generation, dict[int, float]] = field(default_factory=dict)
    fit: Fit = field(default_factory=Fit)
    # Most of the newest shipment went in gaps of training's traffic.
    finds_gaps: bool = False


class Traffic:
    """Thread-safe. Its lock is a leaf: nothing else is locked while it is held."""

    def __init__(
        self,
        chunk_bytes: int,
        limit_gbps: float = 0.0,
        link_share: float = 1.0,
        interface: Interface | None = None,
        *,
        copies: int = 1,
        fills_gaps: bool = False,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._link_share = link_share
        self._copies = max(1, copies)  # of a generation, all sent at the same time
        self._interface = interface or Interface("")
        # Bytes per second: see link_speed(). Of what was measured or seen the most so far.
        self._checked = 0.0
        self._stated = self._interface.bytes_per_second()
        self._seen = 0.0
        self._told: LinkSpeed | None = None
        self._flows: set[Flow] = set()
        self._own_bytes = 0  # that TCP has sent for flows which are over
        self._fills_gaps = fills_gaps
        self._is_watched = False
        self._is_idle = False
        self._changed = threading.Condition()
        self._roles: dict[int, _Role] = {}
        self._bucket: TokenBucket | None = None
        if limit_gbps:
            bits = max(1, round(limit_gbps * _GIGABIT))
            self._bucket = TokenBucket(bits, piece_bytes(bits / 8, chunk_bytes))

    @staticmethod
    def of(settings: Settings, interface: Interface | None) -> Traffic:
        """Returns that of a vault with these settings, which sends over ``interface``."""
        return Traffic(
            settings.chunk_bytes,
            settings.rate_limit_gbps,
            settings.link_share,
            interface,
            copies=settings.replicas,
            fills_gaps=settings.link_gaps == "on",
        )

    # The link.

    def checked(self, bytes_per_second: float) -> None:
        """The check of links has brought bytes over at this speed. It measures what arrives here:
        what leaves is taken to be as fast."""
        with self._changed:
            self._checked = max(self._checked, bytes_per_second)

    def link(self) -> LinkSpeed | None:
        """Returns how fast the link is of which copies take their share; None: not known yet."""
        with self._changed:
            return self._link()

    def _link(self) -> LinkSpeed | None:
        return link_speed(self._checked, self._stated, self._seen)

    def _tell(self, link: LinkSpeed) -> None:
        """Say once by what shipments are paced."""
        if self._told is None or self._told.origin is not link.origin:
            log.info(
                "copies take %g of %.3g Gbit/s, the speed by %s",
                *(self._link_share, link.bytes_per_second * 8 / _GIGABIT, link.origin),
            )
        self._told = link

    def _begin_to_watch(self) -> None:
        with self._changed:
            if self._is_watched or not self._fills_gaps:
                return
            self._is_watched = True
        if not begin_thread("watch-link", self._watch):
            with self._changed:
                self._is_watched = False  # the next shipment tries again

    def _watch(self) -> None:
        """Read the counters for as long as a shipment is paced; a thread of its own."""
        use = LinkUse()
        while True:
            time.sleep(_READ_SECONDS)
            with self._changed:
                link = self._link()
                if link is None or all(flow.schedule is None for flow in self._flows):
                    self._is_watched = self._is_idle = False
                    return
                own_bytes = self._own_bytes + sum(flow.own_bytes() for flow in self._flows)
            try:
                began = time.monotonic()
                reading = Reading(began, self._interface.sent_bytes(), own_bytes)
                if time.monotonic() - began > _READ_SECONDS:  # who knows when it was
                    continue
                found = use.take(reading, link.bytes_per_second)
                seen, why = use.bytes_per_second(), "its counters stand still while copies are sent"
            except (OSError, ValueError) as error:
                found, seen, why = Use.NOT_COUNTED, 0.0, str(error)
            with self._changed:
                # Early shipments, which nothing holds back, had to share the link with training.
                self._seen = max(self._seen, seen)
                if found is Use.NOT_COUNTED:
                    self._is_watched = self._is_idle = self._fills_gaps = False
                elif (found is Use.IDLE) is not self._is_idle:
                    self._is_idle = not self._is_idle
                    self._changed.notify_all()
            if found is Use.NOT_COUNTED:
                name = self._interface.name or "no interface"
                log.info("copies do not know when training sends over %s: %s", name, why)
                return

    # What happens to generations.

    def begin(self) -> None:
        """A new epoch: other placements, perhaps another pace of training. Full speed at first."""
        with self._changed:
            self._roles = {}
            self._changed.notify_all()

    def sealed(self, role: int, generation: Generation) -> None:
        """The own slot of a generation has been sealed."""
        with self._changed:
            self._role(role).window.sealed(generation, time.monotonic())
            self._changed.notify_all()

    def waits(self, role: int, generation: Generation) -> None:
        """The role's member stands at its gate until ``generation`` is committed."""
        with self._changed:
            self._role(role).window.waits(generation, time.monotonic())
            self._changed.notify_all()

    def committed(self, role: int, generation: Generation) -> Fit:
        """A generation is committed; returns how its shipping fitted."""
        with self._changed:
            known = self._role(role)
            now = time.monotonic()
            seconds = known.window.seconds_since_seal(generation, now)
            known.window.committed(generation, now)
            took = known.shipped.get(generation, {})
            known.shipped = {g: t for g, t in known.shipped.items() if g >= generation}
            known.fit = Fit(max(took.values(), default=0.0), known.window.seconds(), seconds)
            return known.fit

    def fits(self) -> dict[int, Fit]:
        """The newest figures of each role."""
        with self._changed:
            return {role: known.fit for role, known in self._roles.items()}

    # Sending.

    def flow(
        self,
        role: int,
        generation: Generation,
        nbytes: int,
        epoch: int,
        sent: Callable[[], Sent] = Sent,
    ) -> Flow:
        """For one shipment, which is over with the ``with`` statement. What an epoch begins with is
        shipped at full speed: until it is there, a second loss would be fatal, which is worse than
        a burst. ``sent``: what the channel has that it goes over.
        """
        with self._changed:
            schedule = None
            link = self._link()
            if generation.lineage == epoch:
                known, speed = self._role(role), link.bytes_per_second if link else 0.0
                gaps = self._fills_gaps
                most = _PATIENT_SHARE if gaps and known.finds_gaps else 1.0
                share = min(self._link_share, most)
                allowed = Allowed(speed / (len(self._roles) * self._copies), share)
                schedule = known.window.schedule(generation, nbytes, allowed, fills_gaps=gaps)
            flow = Flow(self, role, generation, schedule, sent)
            self._flows.add(flow)
        if schedule is not None and link is not None:
            self._tell(link)
            self._begin_to_watch()
        return flow

    def _limit(self, nbytes: int, going: Callable[[], bool]) -> None:
        """Wait until the hard limit lets ``nbytes`` through, or ``going`` answers False."""
        if self._bucket is None:
            return
        with self._changed:
            wait_ns = self._bucket.take(nbytes, time.monotonic_ns())
        end = time.monotonic_ns() + wait_ns
        while going() and (left := end - time.monotonic_ns()) > 0:
            time.sleep(min(left / 1e9, _LONGEST_WAIT_SECONDS))

    def _role(self, role: int) -> _Role:
        return self._roles.setdefault(role, _Role())

    def _held(self, flow: Flow) -> float:
        """Return how long the flow's next piece has to wait for its pace; called under the lock."""
        late = self._role(flow.role).window.is_late(flow.generation)
        if flow.schedule is None or late:
            flow.schedule = None
            return 0.0
        if self._is_idle:  # a gap of training's traffic
            return 0.0
        return flow.schedule.delay_seconds(flow.sent_bytes, time.monotonic())

    def _wait(self, flow: Flow, going: Callable[[], bool]) -> int:
        with self._changed:
            while going() and (wait := self._held(flow)) > 0:
                self._changed.wait(min(wait, _LONGEST_WAIT_SECONDS))
            rate = None if flow.schedule is None else flow.schedule.rate
            flow.is_in_gap = self._is_idle and rate is not None
            if flow.is_in_gap and rate is not None and (link := self._link()) is not None:
                rate = max(rate, link.bytes_per_second)
        most = self._chunk_bytes if self._bucket is None else self._bucket.burst_bytes
        return piece_bytes(rate, most)

    def _ended(self, flow: Flow, node: int, seconds: float) -> None:
        with self._changed:
            if flow.is_free and flow.sent_bytes >= _TELLING_BYTES:
                self._seen = max(self._seen, flow.sent_bytes / max(seconds, 1e-9))
            known = self._role(flow.role)
            known.finds_gaps = 2 * flow.gap_bytes > flow.sent_bytes
            took = known.shipped.setdefault(flow.generation, {})
            took[node] = took.get(node, 0.0) + seconds

    def _closed(self, flow: Flow) -> None:
        with self._changed:
            self._own_bytes += flow.own_bytes()
            self._flows.discard(flow)


class Flow(AbstractContextManager["Flow"]):
    """One shipment. One thread."""

    def __init__(
        self,
        traffic: Traffic,
        role: int,
        generation: Generation,
        schedule: Schedule | None,
        sent: Callable[[], Sent],
    ) -> None:
        self.role = role
        self.generation = generation
        self.schedule = schedule
        self.is_free = schedule is None  # from its beginning
        self.sent_bytes = self.gap_bytes = 0
        self.is_in_gap = False
        self._traffic = traffic
        self._began = time.monotonic()
        self._held_seconds = 0.0
        self._sent = sent
        self._sent_before = sent()

    def __exit__(self, *_: object) -> None:
        self._traffic._closed(self)

    def own_bytes(self) -> int:
        """Return what TCP has sent for it so far."""
        return max(0, self._sent().nbytes - self._sent_before.nbytes)

    def pieces(self, view: memoryview, going: Callable[[], bool]) -> Iterator[memoryview]:
        """The bytes of a part piece by piece, each when it may go; ends early when ``going``
        answers False."""
        start = 0
        while start < len(view) and going():
            before = time.monotonic()
            size = self._traffic._wait(self, going)
            self._held_seconds += time.monotonic() - before
            piece = view[start : start + size]
            self._traffic._limit(len(piece), going)
            if not going():
                return
            yield piece
            start += len(piece)
            self.sent_bytes += len(piece)
            self.gap_bytes += len(piece) * self.is_in_gap

    def end(self, node: int) -> None:
        """``node`` has everything: count what it took, without what the pace held it back; but
        bytes are on their way meanwhile, too."""
        busy = self._sent().busy_seconds - self._sent_before.busy_seconds
        seconds = max(time.monotonic() - self._began - self._held_seconds, busy)
        self._traffic._ended(self, node, seconds)
