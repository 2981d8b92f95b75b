"""The pace of a generation's bytes: they are sent as soon as a share of the NIC allows.

A node that is lost before its newest generation was sent costs the iterations since the generation
before, so copies leave early. While training does not use the NIC, they leave at once. While
training uses it, they are spread evenly, at no more than their share, and accelerate when a gate
comes near. (FFTrainer also sends in idle gaps; REFT's counterpart is its HAS.) Without knowledge of
training's traffic, copies are always spread evenly, over at most the first half of the available
time. That time is learned from past generations: it is the time from a seal until a member waits
for the generation, or until the next seal. A copy that delays training is no longer held back.

Training's bytes are those that the interface of the vault's address has sent, less those that TCP
has sent for the vault. No hook in the training process is needed. Other traffic of the interface,
that of other vaults included, counts as training: copies must not delay it. Restores are not paced,
because no training runs meanwhile.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.transport import Sent, begin_thread

log = logging.getLogger(__name__)

# The part of the available time over which copies are spread without knowledge of training's
# traffic. Data-parallel training reduces gradients in the second half of an iteration: in the first
# half copies disturb nothing, and uneven iterations have some slack.
HALF = 0.5
# The part of the available time at whose end copies that use gaps of training's traffic are sent at
# full speed. The remaining time is for uneven iterations, and for training that sends without gaps:
# it then shares the NIC with late copies half and half.
LATEST = 0.7
# Share of the NIC while training sends and gaps are likely: the last shipment went in gaps.
_GAPS_LIKELY_SHARE = 0.05
# Copies are sent at full speed until this number of intervals is known. The median of the newest
# intervals is used, so that single evaluations and saves do not change it.
_MIN_INTERVALS, _MAX_INTERVALS = 3, 15
# A closed gate shows the time that is really available. That time is used for this number of
# iterations, then the whole iteration is tried again.
_GATE_ITERATIONS = 64
_MAX_GATES = 5
_MAX_SEALS = 16
# The time of a piece at the current rate, within limits. Shorter pieces would be spread more
# evenly, but each wakes a thread that has to wait for the interpreter: a wake-up every 2 ms costs
# as much as the bytes.
_PIECE_SECONDS = 0.016
_MIN_PIECE_BYTES = 64 << 10
# Bytes per second. A slower rate would disturb training as much, and a receiver would drop a
# connection on which no piece arrives for tens of seconds.
MIN_RATE = 1 << 20
# Bounds what a lost wake-up could cost, and the time until the end of an epoch is noticed.
_LONGEST_WAIT_SECONDS = 0.1
_GIGABIT = 1_000_000_000
_MIN_SAMPLE_BYTES = 1 << 18  # shorter shipments are over before they have a speed
# The time between two readings of the interface's counters, while copies wait for their pace.
_READ_SECONDS = 0.01
# The time over which readings are compared. Packets of some milliseconds are in queues: TCP has
# counted them, and the interface has not. In this time they come to less than _MIN_SHARE.
SPAN_SECONDS = 0.05
# Traffic below this share of the NIC is not disturbed, and may be acknowledgements.
_MIN_SHARE = 0.1
_HEADERS = 1.05  # factor for headers, which the interface counts and TCP does not
# The interface must count at least this part of the bytes that TCP has sent, once TCP has sent at
# this share of the link's speed.
_COUNTED, _MIN_SAMPLE_SHARE = 0.1, 0.25
_SYSFS = Path("/sys/class/net")
_COUNTERS = Path("/proc/self/net/dev")  # in the network namespace of the process, unlike /sys
_SENT_COLUMN = 8  # after the name: eight columns for receipt, then the bytes sent
_BYTES_PER_WORD = 4  # port_xmit_data counts words
_ARPHRD_INFINIBAND = "32"


class Pace:
    """The time that is available for the generations of a role. Not thread-safe.

    ``now`` is monotonic time in seconds. ``fit`` has three times of the newest committed
    generation, in seconds (None: not known): that of shipping, without delays by the pace, the
    available time, and the time from seal to commit.
    """

    def __init__(self) -> None:
        self.fit: dict[str, float | None] = {
            "ship_seconds": 0.0,
            "window_seconds": None,
            "commit_seconds": None,
        }
        self.shipped: dict[Generation, float] = {}  # seconds that the slowest copy took
        self.finds_gaps = False  # most of the newest shipment went in gaps of training's traffic
        self.seals: dict[Generation, float] = {}
        self._intervals: deque[float] = deque(maxlen=_MAX_INTERVALS)
        self._gates: deque[tuple[int, float]] = deque(maxlen=_MAX_GATES)
        self._newest: Generation | None = None
        self._waiting: tuple[Generation, float] | None = None
        self._awaited: Generation | None = None
        self._committed: Generation | None = None
        self._stall_seconds = 0.0

    def sealed(self, generation: Generation, now: float) -> None:
        """Note that a generation is sealed in the memory of this node."""
        last, self._newest = self._newest, generation
        if last is not None and last < generation and last.lineage == generation.lineage:
            # The time at the gate is not part of training's own time.
            self._intervals.append(max(0.0, now - self.seals[last] - self._stall_seconds))
        self._stall_seconds = 0.0
        self.seals[generation] = now
        while len(self.seals) > _MAX_SEALS:
            del self.seals[next(iter(self.seals))]

    def waits(self, generation: Generation, now: float) -> None:
        """Note that the role's member waits at its gate until ``generation`` is committed."""
        self._awaited = generation
        if self._committed is not None and generation <= self._committed:
            return  # the messages have crossed, or the member waits for later extras
        self._waiting = generation, now
        if len(self._intervals) >= _MIN_INTERVALS:  # before, no copy was held back
            self._gates.append((generation.iteration, now - self.seals.get(generation, now)))

    def committed(self, generation: Generation, now: float) -> None:
        """Note that ``generation`` is committed, so that a waiting member continues."""
        self._committed = generation
        if self._waiting is not None and self._waiting[0] <= generation:
            self._stall_seconds += now - self._waiting[1]
            self._waiting = None
        self.shipped = {g: seconds for g, seconds in self.shipped.items() if g >= generation}
        sealed = self.seals.get(generation)
        self.fit = {
            "ship_seconds": self.shipped.get(generation, 0.0),
            "window_seconds": self.seconds(),
            "commit_seconds": None if sealed is None else now - sealed,
        }

    def seconds(self) -> float | None:
        """Return the available time for a generation; None while too few intervals are known."""
        if len(self._intervals) < _MIN_INTERVALS or self._newest is None:
            return None
        usual = statistics.median(self._intervals)
        oldest = self._newest.iteration - _GATE_ITERATIONS
        gates = [seconds for iteration, seconds in self._gates if iteration > oldest]
        return min(usual, statistics.median(gates)) if gates else usual

    def is_late(self, generation: Generation) -> bool:
        """Return whether a member waits for the generation, or a newer generation is ready."""
        is_awaited = self._awaited is not None and generation <= self._awaited
        return is_awaited or (self._newest is not None and generation < self._newest)


class SharedNic:
    """A NIC that sends copies: the interface ``name`` (empty: not known), its speed, its
    use, and the rate limit. Thread-safe; no other lock is taken while its lock is held. Tests
    replace the files of ``sysfs`` and ``counters``.

    ``lanes``: the number of NICs among which the copies and the limit are divided. ``first``: the
    first of them, if this is another; all have the same paces of roles, and the same lock.
    """

    def __init__(
        self,
        settings: Settings,
        name: str = "",
        sysfs: Path = _SYSFS,
        counters: Path = _COUNTERS,
        lanes: int = 1,
        first: SharedNic | None = None,
    ) -> None:
        self.name = name
        self._directory, self._counters = sysfs / name, counters
        # The counters of an Ethernet interface lack RDMA. Those of an InfiniBand port include the
        # traffic of the IP interface on it.
        ports = self._directory.glob("device/infiniband/*/ports/*/counters/port_xmit_data")
        self._rdma_ports = sorted(ports) if name else []
        self._is_infiniband = bool(self._rdma_ports) and self._read("type") == _ARPHRD_INFINIBAND
        self.share = settings.link_share
        # Copies of a role's generation that this NIC sends in parallel.
        self.copies = max(1, settings.copies) / lanes
        self.fills_gaps = settings.link_gaps == "on"
        # Bytes per second: the speed that the interface reports, which may exceed that of its
        # network, and the best measured speed, which may be below that of the NIC.
        self._reported_speed, self.measured_speed = self.reported_speed(), 0.0
        self.shares: set[Share] = set()
        self.closed_bytes = 0  # sent by TCP for shipments that have ended
        self.is_watched = self.is_idle = False
        self._readings: deque[tuple[float, int, int]] = deque()
        self.changed: threading.Condition = first.changed if first else threading.Condition()
        self.paces: dict[int, Pace] = first.paces if first else {}
        self._bits = math.ceil(settings.rate_limit_gbps / lanes * _GIGABIT)  # a second; 0: no limit
        rate = self._bits / 8 if self._bits else None
        self.burst_bytes = piece_bytes(rate, settings.chunk_bytes)
        self._full_at = 0  # when the limit allows the next byte, in ns times bits a second

    # Speed and use of the interface.

    def _read(self, name: str) -> str:
        try:
            return (self._directory / name).read_text().strip()
        except OSError:
            return ""

    def reported_speed(self) -> float:
        """Return the speed per direction that the interface reports, 0 if none. A virtual interface
        (veth in a container) reports a meaningless speed."""
        has_hardware = any((self._directory / part).exists() for part in ("device", "bonding"))
        text = self._read("speed") if self.name and has_hardware else ""
        return int(text) * 1e6 / 8 if text.isdigit() else 0.0

    def sent_bytes(self) -> int:
        """Return the bytes that the interface has sent so far, by RDMA too. Raises OSError or
        ValueError where they are not counted."""
        if not self.name:
            raise OSError("the vault's address is of no known interface")
        total = _BYTES_PER_WORD * sum(int(port.read_bytes()) for port in self._rdma_ports)
        for line in () if self._is_infiniband else self._counters.read_text().splitlines():
            name, _, columns = line.partition(":")
            if name.strip() == self.name and len(counts := columns.split()) > _SENT_COLUMN:
                return total + int(counts[_SENT_COLUMN])
        if not self._is_infiniband:
            raise OSError("there is no such interface any more, or it counts nothing")
        return total

    def speed(self) -> tuple[float, str]:
        """Return the best known speed in bytes per second, 0 while none is known, and its
        source."""
        if self._reported_speed:
            return self._reported_speed, "the network interface"
        return self.measured_speed, "the most that was seen on it" if self.measured_speed else ""

    def watch(self) -> None:
        """Read the counters while a shipment is paced; runs in its own thread."""
        self._readings.clear()
        while True:
            time.sleep(_READ_SECONDS)
            with self.changed:
                if not self.speed()[0] or not any(share.seconds for share in self.shares):
                    self.is_watched = self.is_idle = False
                    return
                own_bytes = self.closed_bytes + sum(share.own_bytes() for share in self.shares)
            try:
                began = time.monotonic()
                sent_bytes = self.sent_bytes()
                if time.monotonic() - began > _READ_SECONDS:  # their time is too uncertain
                    continue
                with self.changed:
                    if (is_idle := self.compare(began, sent_bytes, own_bytes)) is not self.is_idle:
                        self.is_idle = is_idle
                        self.changed.notify_all()
            except (OSError, ValueError) as error:
                log.info("copies do not know when training sends over %s: %s", self.name, error)
                with self.changed:
                    self.is_watched = self.is_idle = self.fills_gaps = False
                return

    def compare(self, now: float, sent_bytes: int, own_bytes: int) -> bool:
        """Add a reading, compare it with earlier readings, and return whether only the vault uses
        the NIC; False while too little is known. ``own_bytes``: sent by TCP for the vault, read
        before ``sent_bytes``. Raises ValueError when the counters do not move."""
        readings = self._readings
        readings.append((now, sent_bytes, own_bytes))
        # Keep only the newest of the readings that are at least a span old.
        while len(readings) > 2 and now - readings[1][0] >= SPAN_SECONDS:
            readings.popleft()
        seconds, sent, own = (a - b for a, b in zip(readings[-1], readings[0], strict=True))
        if seconds < SPAN_SECONDS:
            return False
        # Shipments at full speed had to share the link with training, so all its bytes count.
        self.measured_speed = max(self.measured_speed, sent / seconds)
        capacity_bytes = self.speed()[0] * seconds
        if own > _MIN_SAMPLE_SHARE * capacity_bytes and sent < _COUNTED * own:
            raise ValueError("its counters do not move while copies are sent")
        return sent - _HEADERS * own <= _MIN_SHARE * capacity_bytes

    # Progress of generations.

    def pace(self, role: int) -> Pace:
        """Return the pace of a role; called under the lock, except by tests."""
        return self.paces.setdefault(role, Pace())

    def begin(self) -> None:
        """Drop all paces: a new epoch has other placements, and perhaps another speed of
        training."""
        with self.changed:
            self.paces.clear()
            self.changed.notify_all()

    def note(
        self, method: Callable[[Pace, Generation, float], None], role: int, generation: Generation
    ) -> dict[str, float | None]:
        """Call a method of the pace of a role with the present time, and return the pace's
        ``fit``."""
        with self.changed:
            method(self.pace(role), generation, time.monotonic())
            self.changed.notify_all()
            return self.pace(role).fit

    def fits(self) -> dict[int, dict[str, float | None]]:
        """Return the ``fit`` of each role."""
        with self.changed:
            return {role: pace.fit for role, pace in self.paces.items()}

    def let_through(self, nbytes: int, now_ns: int) -> int:
        """Reserve ``nbytes``, at most a burst, and return the time (monotonic ns) at which they may
        be sent. By the generic cell rate algorithm at most ``burst_bytes`` + rate * t pass in any
        time t."""
        if not self._bits:
            return now_ns
        burst, need = self.burst_bytes * 8_000_000_000, nbytes * 8_000_000_000
        self._full_at = max(self._full_at, now_ns * self._bits) + need
        return max(now_ns, -((burst - self._full_at) // self._bits))


class Share(AbstractContextManager["Share"]):
    """A shipment of ``nbytes`` by a ``with`` statement: spread evenly over ``seconds`` (0: at full
    speed) from the seal on, or faster when it is late or would become late.

    The restored generation of an epoch is shipped at full speed: until it has arrived a second loss
    would be fatal, which is worse than a burst. ``sent`` returns the counters of the shipment's
    channel. For one thread.
    """

    def __init__(
        self,
        nic: SharedNic,
        role: int,
        generation: Generation,
        nbytes: int,
        epoch: int,
        sent: Callable[[], Sent] = Sent,
    ) -> None:
        self.seconds = self._begin = self._speed = 0.0
        self._end = math.inf
        self.sent_bytes = self.gap_bytes = 0
        self.is_in_gap = False
        self._nic, self._role, self.generation, self._nbytes = nic, role, generation, nbytes
        self._began, self._held_seconds = time.monotonic(), 0.0
        self._sent, self._sent_before = sent, sent()
        with nic.changed:
            nic.shares.add(self)
            sealed, window = nic.pace(role).seals.get(generation), nic.pace(role).seconds()
            if generation.lineage == epoch and sealed is not None and window and nbytes:
                self._hold_back(sealed, window)
        self.is_free = not self.seconds  # at full speed from the start

    def _hold_back(self, sealed: float, window: float) -> None:
        """Spread the shipment over a part of the available time ``window``, from its seal on."""
        nic = self._nic
        self._begin, self._speed = sealed, nic.speed()[0] / max(1, len(nic.paces) * nic.copies)
        has_gaps = nic.fills_gaps and nic.pace(self._role).finds_gaps
        share = min(nic.share, _GAPS_LIKELY_SHARE if has_gaps else 1.0)
        self.seconds = self._nbytes / max(share * self._speed, MIN_RATE)
        if not nic.fills_gaps or not self._speed:
            self.seconds = min(HALF * window, self.seconds)
            return
        self._end = sealed + LATEST * window
        if not nic.is_watched:
            nic.is_watched = True
            begin_thread("watch-link", nic.watch)

    def due(self) -> float:
        """Return when the next byte may be sent, in monotonic seconds."""
        due = self._begin + self.seconds * self.sent_bytes / self._nbytes
        if self._end < math.inf:
            due = min(due, self._end - (self._nbytes - self.sent_bytes) / self._speed)
        return due

    def __exit__(self, *_: object) -> None:
        with self._nic.changed:
            self._nic.closed_bytes += self.own_bytes()
            self._nic.shares.discard(self)

    def own_bytes(self) -> int:
        """Return the bytes that TCP has sent for the shipment so far."""
        return max(0, self._sent().nbytes - self._sent_before.nbytes)

    def pieces(self, view: memoryview, keep_going: Callable[[], bool]) -> Iterator[memoryview]:
        """Yield the bytes of a part in pieces, each when it may be sent; stop early when
        ``keep_going`` returns False."""
        start = 0
        while start < len(view) and keep_going():
            before = time.monotonic()
            size = self._await_turn(keep_going)
            self._held_seconds += time.monotonic() - before
            piece = view[start : start + size]
            with self._nic.changed:
                end = self._nic.let_through(len(piece), time.monotonic_ns())
            while keep_going() and (left := end - time.monotonic_ns()) > 0:
                time.sleep(min(left / 1e9, _LONGEST_WAIT_SECONDS))
            if not keep_going():
                return
            yield piece
            start += len(piece)
            self.sent_bytes += len(piece)
            self.gap_bytes += len(piece) * self.is_in_gap

    def _await_turn(self, keep_going: Callable[[], bool]) -> int:
        """Wait until the next piece may be sent, and return its maximum size."""
        nic, rate = self._nic, None
        with nic.changed:
            while keep_going() and (wait := self._wait_seconds()) > 0:
                nic.changed.wait(min(wait, _LONGEST_WAIT_SECONDS))
            self.is_in_gap = nic.is_idle and self.seconds > 0
            if self.seconds:
                rate = max(self._nbytes / self.seconds, nic.speed()[0] * self.is_in_gap)
        return piece_bytes(rate, nic.burst_bytes)

    def _wait_seconds(self) -> float:
        if self._nic.pace(self._role).is_late(self.generation):
            self.seconds = 0.0
        return 0.0 if not self.seconds or self._nic.is_idle else self.due() - time.monotonic()

    def end(self) -> None:
        """Record the time of the shipment after its arrival: without the delays by the pace, but at
        least the time during which sent bytes were not acknowledged."""
        busy = self._sent().busy_seconds - self._sent_before.busy_seconds
        seconds = max(time.monotonic() - self._began - self._held_seconds, busy)
        with self._nic.changed:
            if self.is_free and self.sent_bytes >= _MIN_SAMPLE_BYTES:
                speed = self.sent_bytes / max(seconds, 1e-9)
                self._nic.measured_speed = max(self._nic.measured_speed, speed)
            pace = self._nic.pace(self._role)
            pace.finds_gaps = 2 * self.gap_bytes > self.sent_bytes
            shipped = pace.shipped
            shipped[self.generation] = max(shipped.get(self.generation, 0.0), seconds)


def piece_bytes(rate: float | None, max_bytes: int) -> int:
    """Return the size of a piece at a rate (bytes per second; None: full speed)."""
    if rate is None:
        return max_bytes
    return min(max_bytes, max(_MIN_PIECE_BYTES, int(rate * _PIECE_SECONDS)))
