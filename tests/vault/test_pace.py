"""The time there is for a generation, spreading over it, the hard limit, and who uses the link."""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.pace import (
    HALF,
    LATEST,
    LEAST_RATE,
    SPAN_SECONDS,
    Pace,
    Share,
    SharedLink,
    interface_of,
)
from deadpool_megatron.vault.transport import Sent
from tests.vault.harness import wait_until

NEWEST = Generation(1, 5)


def run(pace: Pace, gaps: list[float], first: int = 0, now: float = 100.0) -> float:
    """Seal one generation after the other; answers when the last one was."""
    for iteration, gap in enumerate([0.0, *gaps], first):
        now += gap
        pace.sealed(Generation(1, iteration), now)
    return now


def link_of(**settings: Any) -> SharedLink:
    return SharedLink(Settings(**{"link_gaps": "off", "chunk_bytes": 4 << 20, **settings}))


def shipment(
    link: SharedLink, nbytes: int, generation: Generation = NEWEST, speed: float | None = None
) -> Share:
    """Of role 0, sealed at 100 s; its members have ``speed`` of the link."""
    if speed is not None:
        link.seen = speed
    return Share(link, 0, generation, nbytes, 1)


@given(
    st.floats(0.01, 100), st.lists(st.floats(0, 1e4), max_size=6), st.randoms(use_true_random=False)
)
def test_some_odd_iterations_do_not_move_the_norm(
    usual: float, odd: list[float], mix: random.Random
) -> None:
    """Evaluations, saves and the first iterations after them."""
    pace = Pace()
    gaps = [usual] * (len(odd) + 3) + odd
    mix.shuffle(gaps)
    run(pace, gaps)
    assert pace.seconds() == pytest.approx(usual)


def test_what_the_gate_held_up_is_not_part_of_the_time_there_is() -> None:
    """Or a shipment that does not fit would make its own window longer and longer."""
    pace = Pace()
    now = run(pace, [1.0] * 15)
    for iteration in range(16, 60):
        pace.waits(Generation(1, iteration - 1), now + 0.6)
        pace.committed(Generation(1, iteration - 1), now + 3.0)
        now += 0.6 + 2.4 + 0.4
        pace.sealed(Generation(1, iteration), now)
    assert pace.seconds() == pytest.approx(0.6)  # seal to gate, not seal to seal


def test_a_gate_that_was_shut_once_is_forgotten_in_time() -> None:
    pace = Pace()
    run(pace, [1.0] * 5)
    pace.waits(NEWEST, 105.25)
    pace.committed(NEWEST, 105.25)
    assert pace.seconds() == pytest.approx(0.25)
    run(pace, [1.0] * 50, first=6)
    assert pace.seconds() == pytest.approx(0.25)
    run(pace, [1.0] * 20, first=57)
    assert pace.seconds() == pytest.approx(1.0)


def test_a_member_that_asks_when_all_is_done_has_not_waited() -> None:
    """Its word and the vault's have crossed: counted as a wait it would last until the next one."""
    pace = Pace()
    now = run(pace, [1.0] * 15)
    for iteration in range(15, 40):
        pace.committed(Generation(1, iteration), now + 0.5)
        pace.waits(Generation(1, iteration), now + 0.5001)
        now += 1.0
        pace.sealed(Generation(1, iteration + 1), now)
    assert pace.seconds() == pytest.approx(1.0)
    # Extras that come later than the commit are awaited all the same.
    pace.committed(Generation(1, 40), now + 0.5)
    pace.waits(Generation(1, 40), now + 0.6)
    assert pace.is_late(Generation(1, 40))


def test_late_is_what_somebody_waits_for_or_what_has_a_successor() -> None:
    pace = Pace()
    run(pace, [1.0] * 5)
    assert not pace.is_late(NEWEST)
    pace.waits(NEWEST, 105.7)
    assert pace.is_late(NEWEST)
    pace.committed(NEWEST, 105.8)
    pace.sealed(Generation(1, 6), 106.0)
    assert not pace.is_late(Generation(1, 6))
    assert pace.is_late(NEWEST)


# Shipments.


@given(st.floats(0.001, 1000), st.integers(1, 1 << 40), st.floats(0, 1), st.floats(0, 1e11))
def test_a_shipment_is_even_over_its_share_or_half_of_the_window(
    window: float, nbytes: int, part: float, speed: float
) -> None:
    link = link_of(link_share=0.5, replicas=2)
    sealed = run(link.pace(0), [window] * 5)
    share = shipment(link, nbytes, speed=speed)
    least = nbytes / max(0.5 * speed / 2, LEAST_RATE)
    assert share.seconds == pytest.approx(min(HALF * window, least))
    share.sent_bytes = int(part * nbytes)
    assert share.due() == pytest.approx(sealed + share.seconds * share.sent_bytes / nbytes)
    assert not shipment(link, 0).seconds
    assert not shipment(link, nbytes, Generation(1, 99)).seconds, "not sealed here: not held"


def test_where_gaps_are_found_the_share_is_all_there_is_until_a_gate_comes_near() -> None:
    """Ten seconds from the seal to the gate, seven of which may be used, and a link of 200 MB/s."""
    link = link_of(link_gaps="on", link_share=0.1)
    link.is_watched = True
    sealed = run(link.pace(0), [10.0] * 5)
    share = shipment(link, 700_000_000, speed=2e8)
    assert share.seconds == pytest.approx(35.0)
    # After 100 MB 5.0 would be too late.
    for sent, due in ((20, 1.0), (70, 3.5), (100, 4.0), (200, 4.5)):
        share.sent_bytes = sent * 1_000_000
        assert share.due() == pytest.approx(sealed + due)
    assert shipment(link, 700_000_000, speed=0.0).seconds == pytest.approx(HALF * 10.0)


@given(
    st.floats(0.1, 100),
    st.integers(1, 1 << 34),
    st.floats(1e7, 5e10),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_who_gets_the_link_from_when_he_may_go_is_there_in_time(
    window: float, nbytes: int, speed: float, part_of_link: float, part: float
) -> None:
    """Training sends all the time, however much of a generation has gone."""
    link = link_of(link_gaps="on", link_share=part_of_link)
    link.is_watched = True
    sealed = run(link.pace(0), [window] * 5)
    share = shipment(link, nbytes, speed=speed)
    share.sent_bytes = int(part * nbytes)
    left = (nbytes - share.sent_bytes) / speed
    assert share.due() + left <= sealed + LATEST * window + 1e-6


def test_a_link_is_known_by_what_was_sent_over_it_at_full_speed() -> None:
    """By the busy time of the channel; all roles of the node share it."""
    link, busy = link_of(link_share=0.25), [0.0]
    view = memoryview(bytes(1 << 22))

    def ship(iteration: int) -> float | None:
        generation = Generation(1, iteration)
        link.pace(0).sealed(generation, 1e6 + 1000.0 * iteration)
        share = Share(link, 0, generation, len(view), 1, lambda: Sent(busy[0]))
        rate = len(view) / share.seconds if share.seconds else None
        share.seconds = 0.0
        assert sum(map(len, share.pieces(view, lambda: True))) == len(view)
        busy[0] += 500.0  # far more than the test takes
        share.end()
        return rate

    assert [ship(iteration) for iteration in range(3)] == [None] * 3
    speed, origin = link.speed()
    assert (speed, origin) == (pytest.approx(len(view) / 500.0), "the most that was seen on it")
    link.seen = 1 << 30
    assert ship(3) == pytest.approx(0.25 * (1 << 30))
    link.pace(1)
    assert ship(4) == pytest.approx(0.25 * (1 << 30) / 2)


@given(
    st.integers(1, 400_000_000_000),
    st.integers(1, 1 << 22),
    st.lists(st.tuples(st.integers(0, 1 << 22), st.integers(0, 10**10)), max_size=40),
)
def test_no_time_sees_more_than_the_limit(
    rate: int, burst: int, takes: list[tuple[int, int]]
) -> None:
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


def test_the_limit_is_reached() -> None:
    """Who always has something to send gets the whole rate, to the nanosecond."""
    link, now, sent = link_of(rate_limit_gbps=8.0), 0, 0
    link.burst_bytes = 1000
    for _ in range(5000):
        now = link.let_through(700, now)
        sent += 700
    assert sent - 1000 <= now <= sent  # a byte each nanosecond


@pytest.mark.parametrize("limit_gbps", [0.0, 1000.0])
def test_pieces_are_the_bytes_and_who_waits_is_let_go(limit_gbps: float) -> None:
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


def test_the_end_of_an_epoch_ends_a_wait_and_what_it_began_with_has_none() -> None:
    link, view, going = link_of(), memoryview(bytes(10000)), [True]
    run(link.pace(0), [1000.0] * 5, now=1e6)
    held = shipment(link, len(view))
    assert held.seconds
    going[0] = False
    assert list(held.pieces(view, lambda: going[0])) == []
    restored = Share(link, 0, NEWEST, len(view), epoch=2)
    assert not restored.seconds
    assert sum(map(len, restored.pieces(view, lambda: True))) == 10000
    link.begin()
    assert not shipment(link, len(view)).seconds


# Gaps.


class MadeLink(SharedLink):
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

    def stated(self) -> float:
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
def held_shipment(link: SharedLink) -> Iterator[tuple[threading.Thread, list[int]]]:
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


def test_copies_wait_for_a_gap_and_take_all_of_it() -> None:
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


def test_who_found_gaps_gives_way_next_time_and_who_did_not_takes_his_share() -> None:
    """Training that sends all the time must not hold up copies until a gate comes near."""
    link, rates = MadeLink(link_share=0.3), []
    for iteration, gap_bytes in ((3, 501), (4, 500), (5, 500)):
        with shipment(link, 1 << 20, Generation(1, iteration)) as share:
            rates.append((1 << 20) / share.seconds)
            share.sent_bytes, share.gap_bytes = 1000, gap_bytes
            share.end()
    assert rates == [pytest.approx(share * 1e9) for share in (0.3, 0.05, 0.3)]


def test_a_link_is_as_fast_as_the_most_that_was_seen_on_it() -> None:
    """Shipments that nothing holds back have to share it with training."""
    link = MadeLink(stated=0.0)
    with shipment(link, 1 << 40, speed=1e6):
        wait_until(lambda: link.speed()[0] > 1e8, "the counters are read")
    wait_until(lambda: not watchers(), "nobody reads on")


def test_without_counters_copies_take_their_share_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    link = MadeLink("no such counter")
    with held_shipment(link) as (rest, _):
        wait_until(lambda: not link.fills_gaps, "it is found out")
        wait_until(lambda: not watchers(), "nobody tries again")
        assert rest.is_alive()
        with shipment(link, 1 << 20, Generation(1, 6)) as share:
            assert share.seconds
            assert not watchers()
    assert [record.args for record in caplog.records if "made0" in record.getMessage()]


def test_what_copies_have_sent_is_not_training() -> None:
    """Of those under way and of those that are over."""
    link, sent = link_of(), [Sent(0.0, 100)]
    with Share(link, 0, NEWEST, 1, 1, lambda: sent[0]) as share:
        sent[0] = Sent(0.0, 1100)
        assert (share.own_bytes(), link.closed_bytes) == (1000, 0)
    cut = Share(link, 0, NEWEST, 1, 1, lambda: sent[0])
    with contextlib.suppress(ConnectionResetError), cut:
        sent[0] = Sent(0.0, 1300)
        raise ConnectionResetError
    assert (link.closed_bytes, link.shares) == (1200, set())


# The interface; /sys/class/net is a directory of the test.

_TABLE = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls
    lo: 77 2 0 0 0 0 0 0 88 2 0 0 0 0 0 0
  eth7: 500 5 0 0 0 0 0 0 1000 7 0 0 0 0 0 0
"""


def test_the_interface_of_an_address() -> None:
    assert [interface_of(one) for one in ("127.0.0.1", "192.0.2.77", "::1")] == ["lo", "", ""]


@pytest.mark.parametrize(
    ("name", "part", "speed", "bytes_per_second"),
    [
        ("eth7", "device", "25000\n", 3.125e9),
        ("eth7", "bonding", "200000\n", 25e9),
        ("eth7", "lower_x", "10000\n", 0.0),  # a veth: what it says is not what is behind it
        ("eth7", "device", "-1\n", 0.0),
        ("eth7", "device", "", 0.0),
        ("", "device", "1000", 0.0),
    ],
)
def test_the_speed_an_interface_states(
    tmp_path: Path, name: str, part: str, speed: str, bytes_per_second: float
) -> None:
    (tmp_path / name / part).mkdir(parents=True)
    (tmp_path / name / "speed").write_text(speed)
    assert SharedLink(Settings(), name, tmp_path).stated() == bytes_per_second


def test_what_has_left_by_an_interface(tmp_path: Path) -> None:
    """RDMA passes by the counters of an Ethernet interface; an InfiniBand port counts all."""
    table = tmp_path / "dev"
    table.write_text(_TABLE)
    (tmp_path / "eth7").mkdir()
    assert SharedLink(Settings(), "eth7", tmp_path, table).sent_bytes() == 1000
    for port, words in (("1", "10\n"), ("2", "5\n")):
        counters = tmp_path / "eth7" / "device" / "infiniband" / "mlx5_0" / "ports" / port
        (counters / "counters").mkdir(parents=True)
        (counters / "counters" / "port_xmit_data").write_text(words)
    for kind, nbytes in (("1\n", 1060), ("32\n", 60)):
        (tmp_path / "eth7" / "type").write_text(kind)
        assert SharedLink(Settings(), "eth7", tmp_path, table).sent_bytes() == nbytes
    assert SharedLink(Settings(), "lo").sent_bytes() > 0, "this machine counts them"
    for name, why in (("", "of no known interface"), ("gone0", "no such interface")):
        with pytest.raises(OSError, match=why):
            SharedLink(Settings(), name, tmp_path).sent_bytes()


_TICK_SECONDS = 0.01
# More than enough for all that was seen before to be forgotten.
_TICKS = 2 * round(SPAN_SECONDS / _TICK_SECONDS)
# Of the bytes that the interface counts for those of TCP; not more than packets without offloading.
_HEADERS = 1.046


class Made:
    """A link whose counters are read in ticks; rates are shares of its speed."""

    def __init__(self, speed: float, queue: random.Random | None = None) -> None:
        self.speed, self.link = speed, link_of()
        self.link._stated = speed
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
        return self.link.reads(self.now, int(sent), int(self.own))

    def ticks(self, *, others: float, own: float) -> list[bool]:
        """Enough of them."""
        return [self.tick(others=others, own=own) for _ in range(_TICKS)]


def test_nothing_is_a_gap_until_enough_was_seen() -> None:
    found = Made(1e9).ticks(others=0.0, own=0.0)
    seen = round(SPAN_SECONDS / _TICK_SECONDS)
    assert not any(found[: seen - 1])
    assert all(found[seen + 1 :])


@given(st.floats(1e7, 5e10), st.floats(0.0, 1.0), st.randoms(use_true_random=False))
def test_copies_are_not_taken_for_training(speed: float, own: float, queue: random.Random) -> None:
    """At any pace, with headers, and with packets in queues when the counters are read."""
    assert all(Made(speed, queue).ticks(others=0.0, own=own)[_TICKS // 2 + 1 :])


@given(st.floats(1e7, 5e10), st.floats(0.2, 1.0), st.randoms(use_true_random=False))
def test_training_is_seen_beside_copies_that_take_the_rest(
    speed: float, others: float, queue: random.Random
) -> None:
    """From a fifth of the link on, whatever of the copies is in queues; a tenth without any."""
    made = Made(speed, queue)
    made.ticks(others=0.0, own=1.0)
    assert not made.ticks(others=others, own=1.0 - others)[-1]


def test_a_short_burst_is_seen_and_forgotten_and_a_trickle_is_no_training() -> None:
    """A bucket of gradients that takes the link for 10 ms, and is over; signs of life."""
    made = Made(1e9)
    assert made.ticks(others=0.05, own=0.0)[-1]
    made.tick(others=1.0, own=0.0)
    assert not made.tick(others=1.0, own=0.0)
    assert made.ticks(others=0.0, own=0.0)[-1]
    # A reader that had no processor for a while judges by what passed.
    assert not made.tick(others=0.5, own=0.0, seconds=2.0)
    assert made.tick(others=0.0, own=0.0, seconds=2.0)
    assert len(made.link._readings) <= _TICKS, "what is remembered is a moment"


def test_counters_that_stand_still_tell_nothing() -> None:
    """Of a driver that asks its device once a second, or of an interface that copies do not use."""
    link = link_of()
    link._stated = 1e9
    assert [link.reads(k * _TICK_SECONDS, 10**9, 0) for k in range(_TICKS)][-1]
    own = [int(k * _TICK_SECONDS * 1e9) for k in range(_TICKS)]
    readings = [((k + _TICKS) * _TICK_SECONDS, 10**9, own[k]) for k in range(_TICKS)]
    with pytest.raises(ValueError, match="do not move"):
        assert [link.reads(*reading) for reading in readings]


def test_time_at_a_gate_is_counted_once_and_is_no_time_that_training_needs() -> None:
    """A second commit, of a generation that is not waited for, adds nothing."""
    pace = Pace()
    now = run(pace, [10.0] * 6)
    assert pace.seconds() == 10.0
    held = Generation(1, 6)
    for _ in range(6):
        pace.waits(held, now + 10)
        pace.committed(held, now + 15)
        pace.committed(held, now + 19)
        now, held = now + 15, Generation(1, held.iteration + 1)
        pace.sealed(held, now)
    assert pace.seconds() == 10.0
