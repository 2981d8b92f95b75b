"""What a vault sends for protection, all shippers together: pace, limit, and how it fits.

Every sender of a generation's bytes opens a :class:`Flow` and takes them from it piece by piece.
Restores do not come here: while they go on the run stands, and no training traffic is in their way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.core.link_speed import LinkSpeed, link_speed
from deadpool_megatron.vault.core.pace import Schedule, TokenBucket, Window, piece_bytes
from deadpool_megatron.vault.net.interface import Interface

log = logging.getLogger(__name__)

# Bounds what a lost wake-up could cost; the end of an epoch is seen as soon.
_LONGEST_WAIT_SECONDS = 0.1
_GIGABIT = 1_000_000_000
# What takes fewer bytes is over before it has a speed.
_TELLING_BYTES = 1 << 18


@dataclass
class Fit:
    """How shipping fits: seconds it took for the newest committed generation of a role, without
    what the pace held it back, and those there are (None: not known yet)."""

    ship_seconds: float = 0.0
    window_seconds: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """JSON form, as in events and in the vault's status."""
        return {"ship_seconds": self.ship_seconds, "window_seconds": self.window_seconds}


@dataclass
class _Role:
    window: Window = field(default_factory=Window)
    # Seconds that each node took for its copy of a generation.
    shipped: dict[Generation, dict[int, float]] = field(default_factory=dict)
    fit: Fit = field(default_factory=Fit)


class Traffic:
    """Thread-safe. Its lock is a leaf: nothing else is locked while it is held."""

    def __init__(
        self,
        chunk_bytes: int,
        limit_gbps: float = 0.0,
        link_share: float = 1.0,
        interface: Interface | None = None,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._link_share = link_share
        self._interface = interface or Interface("")
        # Bytes per second: see link_speed(). Of what was measured the most so far.
        self._checked = 0.0
        self._stated = self._interface.bytes_per_second()
        self._shipped = 0.0
        self._told: LinkSpeed | None = None
        self._changed = threading.Condition()
        self._roles: dict[int, _Role] = {}
        self._bucket: TokenBucket | None = None
        if limit_gbps:
            bits = max(1, round(limit_gbps * _GIGABIT))
            self._bucket = TokenBucket(bits, piece_bytes(bits / 8, chunk_bytes))

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
        return link_speed(self._checked, self._stated, self._shipped)

    def _tell(self, link: LinkSpeed) -> None:
        """Say once by what shipments are paced."""
        if self._told is None or self._told.origin is not link.origin:
            log.info(
                "copies take %g of %.3g Gbit/s, the speed by %s",
                *(self._link_share, link.bytes_per_second * 8 / _GIGABIT, link.origin),
            )
        self._told = link

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
        """A generation is committed; answers how its shipping fitted."""
        with self._changed:
            known = self._role(role)
            known.window.committed(generation, time.monotonic())
            took = known.shipped.get(generation, {})
            known.shipped = {g: t for g, t in known.shipped.items() if g >= generation}
            known.fit = Fit(max(took.values(), default=0.0), known.window.seconds())
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
        busy_seconds: Callable[[], float] = lambda: 0.0,
    ) -> Flow:
        """For one shipment. What an epoch begins with is shipped at full speed: until it is there,
        a second loss would be fatal, which is worse than a burst. ``busy_seconds``: that of the
        channel it goes over.
        """
        with self._changed:
            schedule = None
            link = self._link()
            if generation.lineage == epoch:
                speed = link.bytes_per_second if link is not None else 0.0
                share = self._link_share * speed / max(1, len(self._roles))
                schedule = self._role(role).window.schedule(generation, nbytes, share)
        if schedule is not None and link is not None:
            self._tell(link)
        return Flow(self, role, generation, schedule, busy_seconds)

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
        """How long the flow's next piece has to wait for its pace; called under the lock."""
        late = self._role(flow.role).window.is_late(flow.generation)
        if flow.schedule is None or late:
            flow.schedule = None
            return 0.0
        return flow.schedule.delay_seconds(flow.sent_bytes, time.monotonic())

    def _wait(self, flow: Flow, going: Callable[[], bool]) -> int:
        with self._changed:
            while going() and (wait := self._held(flow)) > 0:
                self._changed.wait(min(wait, _LONGEST_WAIT_SECONDS))
        most = self._chunk_bytes if self._bucket is None else self._bucket.burst_bytes
        return piece_bytes(flow.schedule.rate if flow.schedule is not None else None, most)

    def _ended(self, flow: Flow, node: int, seconds: float) -> None:
        with self._changed:
            if flow.is_free and flow.sent_bytes >= _TELLING_BYTES:
                self._shipped = max(self._shipped, flow.sent_bytes / max(seconds, 1e-9))
            took = self._role(flow.role).shipped.setdefault(flow.generation, {})
            took[node] = took.get(node, 0.0) + seconds


class Flow:
    """One shipment. One thread."""

    def __init__(
        self,
        traffic: Traffic,
        role: int,
        generation: Generation,
        schedule: Schedule | None,
        busy_seconds: Callable[[], float],
    ) -> None:
        self.role = role
        self.generation = generation
        self.schedule = schedule
        self.is_free = schedule is None  # from its beginning
        self.sent_bytes = 0
        self._traffic = traffic
        self._began = time.monotonic()
        self._held_seconds = 0.0
        self._busy_seconds = busy_seconds
        self._busy_before = busy_seconds()

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

    def end(self, node: int) -> None:
        """``node`` has everything: count what it took, without what the pace held it back; but
        bytes are on their way meanwhile, too."""
        busy = self._busy_seconds() - self._busy_before
        seconds = max(time.monotonic() - self._began - self._held_seconds, busy)
        self._traffic._ended(self, node, seconds)
