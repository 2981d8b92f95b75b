"""The time there is for a generation, spreading over it, the hard limit, and who uses the link."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import shared_nic
from deadpool_megatron.vault.shared_nic import HALF, LATEST, MIN_RATE, Pace, Share, SharedNic
from tests.vault.harness import wait_until

NEWEST = Generation(1, 5)


def run(pace: Pace, gaps: list[float], first: int = 0, now: float = 100.0) -> float:
    """Seal one generation after the other; answers when the last one was."""
    for iteration, gap in enumerate([0.0, *gaps], first):
        now += gap
        pace.sealed(Generation(1, iteration), now)
    return now


def link_of(**settings: Any) -> SharedNic:
    return SharedNic(Settings(**{"link_gaps": "off", "chunk_bytes": 4 << 20, **settings}))


def shipment(
    link: SharedNic, nbytes: int, generation: Generation = NEWEST, speed: float | None = None
) -> Share:
    """Of role 0, sealed at 100 s; its members have ``speed`` of the link."""
    if speed is not None:
        link.measured_speed = speed
    return Share(link, 0, generation, nbytes, 1)


@given(
    st.floats(0.01, 100), st.lists(st.floats(0, 1e4), max_size=6), st.randoms(use_true_random=False)
)
def test_some_odd_iterations_do_not_move_the_norm(usual, odd, mix):
    """Evaluations, saves and the first iterations after them."""
    pace = Pace()
    gaps = [usual] * (len(odd) + 3) + odd
    mix.shuffle(gaps)
    run(pace, gaps)
    assert pace.seconds() == pytest.approx(usual)


# Shipments.


@given(st.floats(0.001, 1000), st.integers(1, 1 << 40), st.floats(0, 1), st.floats(0, 1e11))
def test_a_shipment_is_even_over_its_share_or_half_of_the_window(window, nbytes, part, speed):
    link = link_of(link_share=0.5, copies=2)
    sealed = run(link.pace(0), [window] * 5)
    share = shipment(link, nbytes, speed=speed)
    least = nbytes / max(0.5 * speed / 2, MIN_RATE)
    assert share.seconds == pytest.approx(min(HALF * window, least))
    share.sent_bytes = int(part * nbytes)
    assert share.due() == pytest.approx(sealed + share.seconds * share.sent_bytes / nbytes)
    assert not shipment(link, 0).seconds
    assert not shipment(link, nbytes, Generation(1, 99)).seconds, "not sealed here: not held"


@given(
    st.floats(0.1, 100),
    st.integers(1, 1 << 34),
    st.floats(1e7, 5e10),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_late_shipment_with_the_whole_link_arrives_in_time(
    window, nbytes, speed, part_of_link, part
):
    """Training sends all the time, however much of a generation has gone."""
    link = link_of(link_gaps="on", link_share=part_of_link)
    link.is_watched = True
    sealed = run(link.pace(0), [window] * 5)
    share = shipment(link, nbytes, speed=speed)
    share.sent_bytes = int(part * nbytes)
    left = (nbytes - share.sent_bytes) / speed
    assert share.due() + left <= sealed + LATEST * window + 1e-6


@given(
    st.integers(1, 400_000_000_000),
    st.integers(1, 1 << 22),
    st.lists(st.tuples(st.integers(0, 1 << 22), st.integers(0, 10**10)), max_size=40),
)
def test_no_time_sees_more_than_the_limit(rate, burst, takes):
    """Exactly: for each pair of admissions, bytes between them against burst and rate * time."""
    link, now = link_of(), 12345
    link._bits, link.burst_bytes = rate, burst
    let_through: list[tuple[int, int]] = []
    for nbytes, later in takes:
        now += later
        nbytes = min(nbytes, burst)
        let_through.append((link.let_through(nbytes, now), nbytes))
    for i, (begin, _) in enumerate(let_through):
        total = 0
        for end, nbytes in let_through[i:]:
            assert end >= begin  # nobody overtakes
            total += nbytes
            # Times are whole nanoseconds: the first may have been let through a part earlier.
            assert total * 8 <= burst * 8 + Fraction(rate * (end + 1 - begin), 10**9)


@pytest.mark.parametrize("limit_gbps", [0.0, 1000.0])
def test_pieces_are_the_bytes_and_end_the_wait_at_a_gate(limit_gbps):
    """An hour's window, and a gate that is found shut in the middle of a shipment."""
    link, newest = link_of(rate_limit_gbps=limit_gbps), Generation(1, 6)
    run(link.pace(0), [3600.0] * 5, now=-6 * 3600.0)
    link.note(Pace.sealed, 0, newest)
    view = memoryview(bytearray(range(256)) * (1 << 18))
    share = shipment(link, len(view), newest)
    pieces = share.pieces(view, lambda: True)
    got = [bytes(next(pieces))]
    rest = threading.Thread(target=lambda: got.extend(map(bytes, pieces)), daemon=True)
    rest.start()
    rest.join(0.05)
    assert rest.is_alive()  # held back: the last piece is due in a minute
    assert len(got[0]) == 64 << 10
    link.note(Pace.waits, 0, newest)
    rest.join(20)
    assert not rest.is_alive()
    assert b"".join(got) == bytes(view)
    share.end()
    fit = link.note(Pace.committed, 0, newest)
    assert 0 < (fit["ship_seconds"] or 0) < 20
    assert link.fits() == {0: fit}


# Gaps.


class MadeLink(SharedNic):
    """Half of a link of 1 GB/s is taken by others until ``idle`` is set; ``error``: nobody counts.
    What the vault sends is not on it. Role 0 has an hour's window.
    """

    def __init__(self, error: str = "", stated: float = 1e9, **settings: Any) -> None:
        self._made_speed, self._error = stated, error
        more = {"link_gaps": "on", "chunk_bytes": 4 << 20, "link_share": 1e-4, **settings}
        super().__init__(Settings(**more), "made0")
        self.idle = threading.Event()
        self.reads_done = self._made_bytes = 0
        run(self.pace(0), [3600.0] * 5, now=-6 * 3600.0)

    def reported_speed(self) -> float:
        return self._made_speed

    def sent_bytes(self) -> int:
        if self._error:
            raise OSError(self._error)
        self.reads_done += 1
        if not self.idle.is_set():
            self._made_bytes = time.monotonic_ns() // 2
        return self._made_bytes


_HELD_BYTES = 64 << 20


@contextlib.contextmanager
def held_shipment(link: SharedNic) -> Iterator[tuple[threading.Thread, list[int]]]:
    """A shipment whose last piece is due in a minute at the share it has; also the sizes of the
    pieces that have gone."""
    link.note(Pace.sealed, 0, Generation(1, 6))
    view, gone, going = memoryview(bytes(_HELD_BYTES)), list[int](), [True]
    with shipment(link, len(view), Generation(1, 6)) as share:
        pieces = share.pieces(view, lambda: going[0])
        rest = threading.Thread(target=lambda: gone.extend(map(len, pieces)), daemon=True)
        rest.start()
        yield rest, gone
        going[0] = False
        rest.join(20)
        assert not rest.is_alive()


def watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "watch-link"]


def test_copies_wait_for_a_gap_and_use_all_of_it():
    link = MadeLink()
    with held_shipment(link) as (rest, gone):
        wait_until(lambda: link.reads_done > 30, "the counters are read")
        assert rest.is_alive()
        assert not link.is_idle
        assert max(gone) == 64 << 10
        link.idle.set()
        rest.join(20)
        assert not rest.is_alive()
        assert sum(gone) == _HELD_BYTES
        assert max(gone) == 4 << 20, "few turns of a thread, once nothing is in the way"
    wait_until(lambda: not watchers(), "nobody reads the counters while nothing is shipped")


# Its counters.


_TICK_SECONDS = 0.01
# More than enough for all that was seen before to be forgotten.
_TICKS = 2 * round(shared_nic.SPAN_SECONDS / _TICK_SECONDS)
# Of the bytes that the interface counts for those of TCP; not more than packets without offloading.
_HEADERS = 1.046


class Made:
    """A link whose counters are read in ticks; rates are shares of its speed."""

    def __init__(self, speed: float, queue: random.Random | None = None) -> None:
        self.speed, self.link = speed, link_of()
        self.link._reported_speed = speed
        self.now, self.others, self.own = 1000.0, 5e9, 7e9
        self._queue = queue

    def tick(self, *, others: float, own: float, seconds: float = _TICK_SECONDS) -> bool:
        """Time passes; whether a gap is found at the end of it."""
        self.now += seconds
        self.others += others * self.speed * seconds
        self.own += own * self.speed * seconds
        # TCP has counted what is still in a queue, some milliseconds at most.
        late = self._queue.uniform(0, 0.003) * self.speed if self._queue and own else 0.0
        sent = self.others + _HEADERS * (self.own - late)
        return self.link.compare(self.now, int(sent), int(self.own))

    def ticks(self, *, others: float, own: float) -> list[bool]:
        """Enough of them."""
        return [self.tick(others=others, own=own) for _ in range(_TICKS)]


@given(st.floats(1e7, 5e10), st.floats(0.0, 1.0), st.randoms(use_true_random=False))
def test_copies_are_not_taken_for_training(speed, own, queue):
    """At any pace, with headers, and with packets in queues when the counters are read."""
    assert all(Made(speed, queue).ticks(others=0.0, own=own)[_TICKS // 2 + 1 :])


@given(st.floats(1e7, 5e10), st.floats(0.2, 1.0), st.randoms(use_true_random=False))
def test_training_is_seen_beside_copies_that_take_the_rest(speed, others, queue):
    """From a fifth of the link on, whatever of the copies is in queues; a tenth without any."""
    made = Made(speed, queue)
    made.ticks(others=0.0, own=1.0)
    assert not made.ticks(others=others, own=1.0 - others)[-1]
