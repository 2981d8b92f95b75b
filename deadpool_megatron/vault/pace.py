"""The pace of a generation's bytes: they go as soon as a share of the link allows.

A node that is lost before its newest generation has left costs the iterations since the one before,
so copies leave early: at once while training does not use the link. While it does they go evenly,
at no more than their share of it (FFTrainer sends in idle gaps; REFT calls its kind HAS), and hurry
when a gate comes near. Where nobody knows when training sends they go evenly all the time; if their
share would take longer than the first half of the time there is, they take what the half requires.
That time is learned from past generations: from the seal until somebody waits for it, or until the
next one is sealed. Holding back is a courtesy and ends at once where it would cost anything.

What the interface of the vault's address has sent, less what TCP has sent for the vault, is
training's. Nobody has to tell when it communicates, and it needs no hook in the training process.
Neighbours on the same interface count as well, and what other vaults of the host send: nobody is to
be held up by copies. Restores do not come here: while they continue the run stands, and no training
traffic is in their way.
"""

from __future__ import annotations

import fcntl
import logging
import math
import socket
import statistics
import struct
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

# Of the time there is, at most, where nobody knows when training sends. Data-parallel training
# reduces gradients in the second half of an iteration; what is sent before that is in nobody's way,
# and uneven iterations have their room.
HALF = 0.5
# The same where copies find the gaps of training's traffic. The rest is left for uneven iterations,
# and for training that sends all the time: then who hurries gets half of the link.
LATEST = 0.7
# Of the link, at most, while training sends and gaps are sure to come: there were some last time.
_PATIENT_SHARE = 0.05
# So few intervals are not a norm yet: full speed until then. Of the most the median is taken: some
# evaluations and saves among them do not move it.
_MIN_INTERVALS, _MAX_INTERVALS = 3, 15
# A gate that was found shut tells how much of an iteration there really is. So many iterations are
# tried with it before the whole iteration is tried again.
_GATE_ITERATIONS = 64
_MAX_GATES = 5
_MAX_SEALS = 16
# One piece takes about so long at the rate in force, within limits: even, but few turns of a thread
# that has to wait for the interpreter (with 2 ms they cost as much as the bytes).
_PIECE_SECONDS = 0.016
_MIN_PIECE_BYTES = 64 << 10
# Slower than this is in nobody's way either, but who receives would take a connection for dead on
# which no piece comes for tens of seconds.
MIN_RATE = 1 << 20
# Bounds what a lost wake-up could cost; the end of an epoch is seen as soon.
_LONGEST_WAIT_SECONDS = 0.1
_GIGABIT = 1_000_000_000
_MIN_SAMPLE_BYTES = 1 << 18  # what takes fewer bytes is over before it has a speed
# Between two readings of the interface's counters, while copies wait for their pace.
_READ_SECONDS = 0.01
# Between what TCP has handed over and what the interface has counted lie some milliseconds of
# packets in queues. In such a time they come to less than the least share.
SPAN_SECONDS = 0.05
# Who takes less of the link than this is not disturbed, and may be acknowledgements.
_MIN_SHARE = 0.1
_HEADERS = 1.05  # of packets that are not joined, which the interface counts and TCP does not
# The interface must count at least this of what was sent, once that was a share of the link.
_COUNTED, _MIN_SAMPLE_SHARE = 0.1, 0.25
_SYSFS = Path("/sys/class/net")
_COUNTERS = Path("/proc/self/net/dev")  # of the process's own namespace, whatever is on /sys
_SENT_COLUMN = 8  # after the name: eight columns of what was received, then the bytes sent
_SIOCGIFADDR = 0x8915
_BYTES_PER_WORD = 4  # in which port_xmit_data counts
_ARPHRD_INFINIBAND = "32"


def interface_of(address: str) -> str:
    """Returns the interface whose first IPv4 address this is; empty where there is none."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


class Pace:
    """Knowledge of the time that generations of one role have. Not thread-safe.

    ``now`` is monotonic time in seconds. ``fit``: of the newest committed generation the seconds
    that shipping took without what the pace held it back, those there are, and those from its seal
    to its commit (None: not known).
    """

    def __init__(self) -> None:
        self.fit: dict[str, float | None] = {
            "ship_seconds": 0.0,
            "window_seconds": None,
            "commit_seconds": None,
        }
        self.shipped: dict[Generation, float] = {}  # seconds that its slowest copy took
        self.finds_gaps = False  # most of the newest shipment went in gaps of training's traffic
        self.seals: dict[Generation, float] = {}
        self._intervals: deque[float] = deque(maxlen=_MAX_INTERVALS)
        self._gates: deque[tuple[int, float]] = deque(maxlen=_MAX_GATES)
        self._newest: Generation | None = None
        self._waiting: tuple[Generation, float] | None = None
        self._hurried: Generation | None = None
        self._committed: Generation | None = None
        self._stall_seconds = 0.0

    def sealed(self, generation: Generation, now: float) -> None:
        """A generation lies whole in the own node's memory."""
        last, self._newest = self._newest, generation
        if last is not None and last < generation and last.lineage == generation.lineage:
            # What the gate held up is no time that training needs.
            self._intervals.append(max(0.0, now - self.seals[last] - self._stall_seconds))
        self._stall_seconds = 0.0
        self.seals[generation] = now
        while len(self.seals) > _MAX_SEALS:
            del self.seals[next(iter(self.seals))]

    def waits(self, generation: Generation, now: float) -> None:
        """The role's member stands at its gate until ``generation`` is committed."""
        self._hurried = generation
        if self._committed is not None and generation <= self._committed:
            return  # its word has crossed ours, or it waits for extras that came later
        self._waiting = generation, now
        if len(self._intervals) >= _MIN_INTERVALS:  # before, nothing was held back
            self._gates.append((generation.iteration, now - self.seals.get(generation, now)))

    def committed(self, generation: Generation, now: float) -> None:
        """``generation`` is committed, and whoever waited for it continues."""
        self._committed = generation
        if self._waiting is not None and self._waiting[0] <= generation:
            self._stall_seconds += now - self._waiting[1]
            self._waiting = None
        self.shipped = {g: one for g, one in self.shipped.items() if g >= generation}
        sealed = self.seals.get(generation)
        self.fit = {
            "ship_seconds": self.shipped.get(generation, 0.0),
            "window_seconds": self.seconds(),
            "commit_seconds": None if sealed is None else now - sealed,
        }

    def seconds(self) -> float | None:
        """The time there is for one generation; None while too little has been seen."""
        if len(self._intervals) < _MIN_INTERVALS or self._newest is None:
            return None
        usual = statistics.median(self._intervals)
        oldest = self._newest.iteration - _GATE_ITERATIONS
        gates = [seconds for iteration, seconds in self._gates if iteration > oldest]
        return min(usual, statistics.median(gates)) if gates else usual

    def is_late(self, generation: Generation) -> bool:
        """True when somebody waits for the generation, or a newer one is there to be shipped."""
        awaited = self._hurried is not None and generation <= self._hurried
        return awaited or (self._newest is not None and generation < self._newest)


class SharedNic:
    """The link by which all copies of a node leave: the interface ``name`` (empty: not known), its
    speed, who uses it, and the hard limit. Thread-safe; its lock is a leaf: nothing else is locked
    while it is held. The files are other ones in tests."""

    def __init__(
        self, settings: Settings, name: str = "", sysfs: Path = _SYSFS, counters: Path = _COUNTERS
    ) -> None:
        self.name = name
        self._directory, self._counters = sysfs / name, counters
        # RDMA passes by the counters of an Ethernet interface. Those of an InfiniBand port have
        # what the IP interface on it sends as well.
        ports = self._directory.glob("device/infiniband/*/ports/*/counters/port_xmit_data")
        self._rdma_ports = sorted(ports) if name else []
        self._is_infiniband = bool(self._rdma_ports) and self._read("type") == _ARPHRD_INFINIBAND
        self.share = settings.link_share
        self.copies = max(1, settings.replicas)  # of a generation, all sent at the same time
        self.fills_gaps = settings.link_gaps == "on"
        # Bytes per second: what the interface says, which may be more than the network behind it
        # carries; what a shipment had that nothing held back, or the interface has sent in a
        # moment, which may be less than the link has.
        self._stated, self.seen = self.stated(), 0.0
        self.shares: set[Share] = set()
        self.closed_bytes = 0  # that TCP has sent for shipments which are over
        self.is_watched = self.is_idle = False
        self._readings: deque[tuple[float, int, int]] = deque()
        self.changed = threading.Condition()
        self.paces: dict[int, Pace] = {}
        self._bits = math.ceil(settings.rate_limit_gbps * _GIGABIT)  # a second; 0: no limit
        rate = self._bits / 8 if self._bits else None
        self.burst_bytes = piece_bytes(rate, settings.chunk_bytes)
        self._full_at = 0  # when all that was let through is paid for, in ns times bits a second

    # Its speed, and who uses it.

    def _read(self, name: str) -> str:
        try:
            return (self._directory / name).read_text().strip()
        except OSError:
            return ""

    def stated(self) -> float:
        """Returns its speed in one direction by its own word, 0 where it does not say. A virtual
        interface (veth in a container) names a speed that nothing stands behind."""
        has_hardware = any((self._directory / part).exists() for part in ("device", "bonding"))
        text = self._read("speed") if self.name and has_hardware else ""
        return int(text) * 1e6 / 8 if text.isdigit() else 0.0

    def sent_bytes(self) -> int:
        """Returns the bytes that have left by it so far, those of RDMA too. Raises OSError or
        ValueError where nobody counts them."""
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
        """Returns the best that is known of it, in bytes per second, 0 while nothing is, and from
        where."""
        if self._stated:
            return self._stated, "the network interface"
        return self.seen, "the most that was seen on it" if self.seen else ""

    def watch(self) -> None:
        """Read the counters for as long as a shipment is paced; a thread of its own."""
        self._readings.clear()
        while True:
            time.sleep(_READ_SECONDS)
            with self.changed:
                if not self.speed()[0] or not any(one.seconds for one in self.shares):
                    self.is_watched = self.is_idle = False
                    return
                own_bytes = self.closed_bytes + sum(one.own_bytes() for one in self.shares)
            try:
                began = time.monotonic()
                sent_bytes = self.sent_bytes()
                if time.monotonic() - began > _READ_SECONDS:  # who knows when it was
                    continue
                with self.changed:
                    if (is_idle := self.reads(began, sent_bytes, own_bytes)) is not self.is_idle:
                        self.is_idle = is_idle
                        self.changed.notify_all()
            except (OSError, ValueError) as error:
                log.info("copies do not know when training sends over %s: %s", self.name, error)
                with self.changed:
                    self.is_watched = self.is_idle = self.fills_gaps = False
                return

    def reads(self, now: float, sent_bytes: int, own_bytes: int) -> bool:
        """Returns whether nobody but the vault uses the link, by the readings of the last moments;
        False while too little is known. ``own_bytes``: what TCP has sent for the vault, read before
        ``sent_bytes``. Raises ValueError when the counters tell nothing."""
        readings = self._readings
        readings.append((now, sent_bytes, own_bytes))
        # The oldest one that is kept is the youngest that is old enough.
        while len(readings) > 2 and now - readings[1][0] >= SPAN_SECONDS:
            readings.popleft()
        seconds, sent, own = (a - b for a, b in zip(readings[-1], readings[0], strict=True))
        if seconds < SPAN_SECONDS:
            return False
        # Early shipments, which nothing holds back, had to share the link with training.
        self.seen = max(self.seen, sent / seconds)
        bytes_there_were = self.speed()[0] * seconds
        if own > _MIN_SAMPLE_SHARE * bytes_there_were and sent < _COUNTED * own:
            raise ValueError("its counters do not move while copies are sent")
        return sent - _HEADERS * own <= _MIN_SHARE * bytes_there_were

    # What happens to generations.

    def pace(self, role: int) -> Pace:
        """Return that of a role; called under the lock, but by tests."""
        return self.paces.setdefault(role, Pace())

    def begin(self) -> None:
        """A new epoch: other placements, perhaps another pace of training. Full speed at first."""
        with self.changed:
            self.paces = {}
            self.changed.notify_all()

    def note(
        self, method: Callable[[Pace, Generation, float], None], role: int, generation: Generation
    ) -> dict[str, float | None]:
        """Have the pace of a role know what has happened now: one of its methods. Returns how its
        newest shipping fitted."""
        with self.changed:
            method(self.pace(role), generation, time.monotonic())
            self.changed.notify_all()
            return self.pace(role).fit

    def fits(self) -> dict[int, dict[str, float | None]]:
        """The newest figures of each role."""
        with self.changed:
            return {role: pace.fit for role, pace in self.paces.items()}

    def let_through(self, nbytes: int, now_ns: int) -> int:
        """Reserve; returns when so many bytes, a burst at most, may go: in any time t no more than
        ``burst_bytes`` + rate * t are let through. The generic cell rate algorithm."""
        if not self._bits:
            return now_ns
        burst, takes = self.burst_bytes * 8_000_000_000, nbytes * 8_000_000_000
        self._full_at = max(self._full_at, now_ns * self._bits) + takes
        return max(now_ns, -((burst - self._full_at) // self._bits))


class Share(AbstractContextManager["Share"]):
    """One shipment of ``nbytes``, which is over with the ``with`` statement: evenly over
    ``seconds`` (0: at full speed) from the seal on; what is late may go, and what would come too
    late else.

    What an epoch begins with is shipped at full speed: until it is there, a second loss would be
    fatal, which is worse than a burst. ``sent``: what the channel has that it goes over. One
    thread.
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
        self.is_free = not self.seconds  # from its beginning

    def _hold_back(self, sealed: float, window: float) -> None:
        """Spread it over the time there is from its seal on."""
        nic = self._nic
        self._begin, self._speed = sealed, nic.speed()[0] / (len(nic.paces) * nic.copies)
        is_patient = nic.fills_gaps and nic.pace(self._role).finds_gaps
        share = min(nic.share, _PATIENT_SHARE if is_patient else 1.0)
        self.seconds = self._nbytes / max(share * self._speed, MIN_RATE)
        if not nic.fills_gaps or not self._speed:
            self.seconds = min(HALF * window, self.seconds)
            return
        self._end = sealed + LATEST * window
        if not nic.is_watched:
            nic.is_watched = True
            begin_thread("watch-link", nic.watch)

    def due(self) -> float:
        """Returns when the next byte may go, in monotonic seconds."""
        due = self._begin + self.seconds * self.sent_bytes / self._nbytes
        if self._end < math.inf:
            due = min(due, self._end - (self._nbytes - self.sent_bytes) / self._speed)
        return due

    def __exit__(self, *_: object) -> None:
        with self._nic.changed:
            self._nic.closed_bytes += self.own_bytes()
            self._nic.shares.discard(self)

    def own_bytes(self) -> int:
        """Return what TCP has sent for it so far."""
        return max(0, self._sent().nbytes - self._sent_before.nbytes)

    def pieces(self, view: memoryview, going: Callable[[], bool]) -> Iterator[memoryview]:
        """The bytes of a part piece by piece, each when it may go; ends early when ``going``
        answers False."""
        start = 0
        while start < len(view) and going():
            before = time.monotonic()
            size = self._await_turn(going)
            self._held_seconds += time.monotonic() - before
            piece = view[start : start + size]
            with self._nic.changed:
                end = self._nic.let_through(len(piece), time.monotonic_ns())
            while going() and (left := end - time.monotonic_ns()) > 0:
                time.sleep(min(left / 1e9, _LONGEST_WAIT_SECONDS))
            if not going():
                return
            yield piece
            start += len(piece)
            self.sent_bytes += len(piece)
            self.gap_bytes += len(piece) * self.is_in_gap

    def _await_turn(self, going: Callable[[], bool]) -> int:
        """Wait until the next piece may go by its pace; returns how large it may be."""
        nic, rate = self._nic, None
        with nic.changed:
            while going() and (wait := self._wait_seconds()) > 0:
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
        """The other end has everything: count what it took, without what the pace held it back; but
        bytes are on their way meanwhile, too."""
        busy = self._sent().busy_seconds - self._sent_before.busy_seconds
        seconds = max(time.monotonic() - self._began - self._held_seconds, busy)
        with self._nic.changed:
            if self.is_free and self.sent_bytes >= _MIN_SAMPLE_BYTES:
                speed = self.sent_bytes / max(seconds, 1e-9)
                self._nic.seen = max(self._nic.seen, speed)
            pace = self._nic.pace(self._role)
            pace.finds_gaps = 2 * self.gap_bytes > self.sent_bytes
            shipped = pace.shipped
            shipped[self.generation] = max(shipped.get(self.generation, 0.0), seconds)


def piece_bytes(rate: float | None, max_bytes: int) -> int:
    """Bytes that go at once at a rate (bytes per second; None: full speed)."""
    if rate is None:
        return max_bytes
    return min(max_bytes, max(_MIN_PIECE_BYTES, int(rate * _PIECE_SECONDS)))
