"""The time there is for a generation, spreading over it, and the hard limit: no processes."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.core.interface import Interface, Origin
from deadpool_megatron.vault.core.pace import (
    LATEST,
    SHARE,
    Allowed,
    Schedule,
    TokenBucket,
    Window,
    piece_bytes,
)
from deadpool_megatron.vault.core.traffic import Traffic
from deadpool_megatron.vault.net.transport import Sent
from tests.common.threads import short_of_threads
from tests.vault.harness import wait_until


def run(window: Window, gaps: list[float], first: int = 0) -> float:
    """Seal one generation after the other; answers when the last one was."""
    now = 100.0
    for iteration, gap in enumerate([0.0, *gaps], first):
        now += gap
        window.sealed(Generation(1, iteration), now)
    return now


def plan(window: Window, generation: Generation, nbytes: int, share: float) -> Schedule | None:
    """As where nobody knows when training sends; ``share``: in bytes per second."""
    return window.schedule(generation, nbytes, Allowed(share, 1.0), fills_gaps=False)


@given(
    st.floats(0.01, 100),
    st.lists(st.floats(0, 1e4), max_size=6),
    st.randoms(use_true_random=False),
)
def test_some_odd_iterations_do_not_move_the_norm(
    usual: float, odd: list[float], mix: random.Random
) -> None:
    """Evaluations, saves and the first iterations after them."""
    window = Window()
    gaps = [usual] * (len(odd) + 3) + odd
    mix.shuffle(gaps)
    run(window, gaps)
    assert window.seconds() == pytest.approx(usual)


def test_what_the_gate_held_up_is_not_part_of_the_time_there_is() -> None:
    """Or a shipment that does not fit would make its own window longer and longer."""
    window = Window()
    now = run(window, [1.0] * 15)
    for iteration in range(16, 60):
        window.waits(Generation(1, iteration - 1), now + 0.6)
        window.committed(Generation(1, iteration - 1), now + 3.0)
        now += 0.6 + 2.4 + 0.4
        window.sealed(Generation(1, iteration), now)
    assert window.seconds() == pytest.approx(0.6)  # seal to gate, not seal to seal


def test_a_gate_that_was_shut_once_is_forgotten_in_time() -> None:
    window = Window()
    run(window, [1.0] * 5)
    window.waits(Generation(1, 5), 105.25)
    window.committed(Generation(1, 5), 105.25)
    assert window.seconds() == pytest.approx(0.25)
    run(window, [1.0] * 50, first=6)
    assert window.seconds() == pytest.approx(0.25)
    run(window, [1.0] * 20, first=57)
    assert window.seconds() == pytest.approx(1.0)


def test_gates_of_the_first_iterations_say_nothing() -> None:
    """They wait for what is made once; nothing is spread yet."""
    window = Window()
    window.waits(Generation(1, 0), 100.0)
    window.committed(Generation(1, 0), 100.0)
    run(window, [1.0] * 5)
    assert window.seconds() == 1.0


def test_a_member_that_asks_when_all_is_done_has_not_waited() -> None:
    """Its word and the vault's have crossed: counted as a wait it would last until the next one."""
    window = Window()
    now = run(window, [1.0] * 15)
    for iteration in range(15, 40):
        window.committed(Generation(1, iteration), now + 0.5)
        window.waits(Generation(1, iteration), now + 0.5001)
        now += 1.0
        window.sealed(Generation(1, iteration + 1), now)
    assert window.seconds() == pytest.approx(1.0)
    # Extras that come later than the commit are awaited all the same.
    window.committed(Generation(1, 40), now + 0.5)
    window.waits(Generation(1, 40), now + 0.6)
    assert window.is_late(Generation(1, 40))


def test_late_is_what_somebody_waits_for_or_what_has_a_successor() -> None:
    window = Window()
    run(window, [1.0] * 5)
    assert not window.is_late(Generation(1, 5))
    window.waits(Generation(1, 5), 105.7)
    assert window.is_late(Generation(1, 5))
    window.committed(Generation(1, 5), 105.8)
    window.sealed(Generation(1, 6), 106.0)
    assert not window.is_late(Generation(1, 6))
    assert window.is_late(Generation(1, 5))


def test_a_new_lineage_is_no_gap() -> None:
    window = Window()
    run(window, [1.0] * 4)
    window.sealed(Generation(2, 3), 900.0)
    assert window.seconds() == 1.0


@given(st.floats(0.001, 1000), st.integers(1, 1 << 40), st.floats(0, 1))
def test_a_schedule_is_even_and_ends_in_time(seconds: float, nbytes: int, part: float) -> None:
    schedule = Schedule(begin=50.0, seconds=seconds, nbytes=nbytes)
    assert schedule.delay_seconds(0, 50.0) == 0
    sent = int(part * nbytes)
    due = 50.0 + schedule.delay_seconds(sent, 50.0)
    assert due == pytest.approx(50.0 + seconds * sent / nbytes)
    # From the end of the share on nothing is held back, whatever has been sent.
    assert schedule.delay_seconds(sent, 50.0 + seconds * 1.000001) <= 0


def test_a_shipment_takes_its_share_of_the_link_or_half_of_the_window() -> None:
    window = Window()
    run(window, [2.0] * 5)
    for share, seconds in ((0.0, SHARE * 2.0), (1e9, SHARE * 2.0), (4e9, (1 << 30) / 4e9)):
        schedule = plan(window, Generation(1, 5), 1 << 30, share)
        assert schedule is not None
        assert (schedule.begin, schedule.seconds) == (110.0, pytest.approx(seconds))
    few = plan(window, Generation(1, 5), 200_000, 0.0)
    assert few is not None
    assert few.rate == 1 << 20, "or it would be taken for dead"
    assert plan(window, Generation(1, 99), 1000, 0.0) is None  # not sealed here: not to be held
    assert plan(window, Generation(1, 5), 0, 0.0) is None


def test_where_gaps_are_found_the_share_is_all_there_is_until_a_gate_comes_near() -> None:
    """Ten seconds from the seal to the gate, seven of which may be used, and a link of 200 MB/s."""
    window = Window()
    sealed = run(window, [10.0] * 5)
    nbytes, allowed = 700_000_000, Allowed(2e8, 0.1)
    schedule = window.schedule(Generation(1, 5), nbytes, allowed, fills_gaps=True)
    assert schedule is not None
    assert schedule.rate == pytest.approx(2e7)
    assert schedule.delay_seconds(20_000_000, sealed) == pytest.approx(1.0)
    assert schedule.delay_seconds(70_000_000, sealed) == pytest.approx(3.5)
    assert schedule.delay_seconds(100_000_000, sealed) == pytest.approx(4.0), "5.0 is too late"
    assert schedule.delay_seconds(200_000_000, sealed) == pytest.approx(4.5)
    unknown = window.schedule(Generation(1, 5), nbytes, Allowed(0.0, 0.1), fills_gaps=True)
    assert unknown == plan(window, Generation(1, 5), nbytes, 0.0)


@given(
    st.floats(0.1, 100),
    st.integers(1, 1 << 34),
    st.floats(1e7, 5e10),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_who_gets_the_link_from_when_he_may_go_is_there_in_time(
    window_seconds: float, nbytes: int, link: float, share: float, part: float
) -> None:
    """Training sends all the time, however much of a generation has gone."""
    window = Window()
    sealed = run(window, [window_seconds] * 5)
    schedule = window.schedule(Generation(1, 5), nbytes, Allowed(link, share), fills_gaps=True)
    assert schedule is not None
    sent = int(part * nbytes)
    may_go = sealed + schedule.delay_seconds(sent, sealed)
    assert may_go + (nbytes - sent) / link <= sealed + LATEST * window_seconds + 1e-6


def test_a_link_is_known_by_what_was_sent_over_it_at_full_speed() -> None:
    """By the busy time of the channel; all roles of the node share it."""
    traffic, busy = Traffic(chunk_bytes=4 << 20, link_share=0.25), [0.0]
    view = memoryview(bytes(1 << 22))

    def ship(iteration: int) -> float | None:
        generation = Generation(1, iteration)
        traffic._role(0).window.sealed(generation, 1e6 + 1000.0 * iteration)
        flow = traffic.flow(0, generation, len(view), 1, lambda: Sent(busy[0]))
        rate = None if flow.schedule is None else flow.schedule.rate
        flow.schedule = None
        assert sum(map(len, flow.pieces(view, lambda: True))) == len(view)
        busy[0] += 500.0  # far more than the test takes
        flow.end(1)
        return rate

    assert [ship(iteration) for iteration in range(3)] == [None] * 3
    link = traffic.link()
    assert link is not None
    assert link.origin is Origin.SEEN
    assert link.bytes_per_second == pytest.approx(len(view) / 500.0)
    traffic._seen = 1 << 30
    assert ship(3) == pytest.approx(0.25 * (1 << 30))
    traffic._role(1)
    assert ship(4) == pytest.approx(0.25 * (1 << 30) / 2)


def test_the_share_is_of_what_the_check_has_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the interface says and shipments had; who reads the vault's log sees it once."""
    (tmp_path / "eth7" / "device").mkdir(parents=True)
    (tmp_path / "eth7" / "speed").write_text("8000")
    caplog.set_level(logging.INFO)
    traffic = Traffic(4 << 20, link_share=0.25, interface=Interface("eth7", tmp_path))
    window = traffic._role(0).window

    def rate(iteration: int) -> float:
        window.sealed(Generation(1, iteration), 1e6 + 1000.0 * iteration)
        schedule = traffic.flow(0, Generation(1, iteration), 1 << 33, 1).schedule
        return 0.0 if schedule is None else schedule.rate

    traffic._seen = 1e8
    assert [rate(iteration) for iteration in range(6)] == [0.0] * 3 + [pytest.approx(0.25e9)] * 3
    traffic.checked(4e8)
    traffic.checked(3e8)
    assert [rate(iteration) for iteration in range(6, 9)] == [pytest.approx(1e8)] * 3
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "copies take 0.25 of 8 Gbit/s, the speed by the network interface",
        "copies take 0.25 of 3.2 Gbit/s, the speed by the check of links",
    ]


@given(
    st.integers(1, 400_000_000_000),
    st.integers(1, 1 << 22),
    st.lists(st.tuples(st.integers(0, 1 << 22), st.integers(0, 10**10)), max_size=40),
)
def test_no_time_sees_more_than_the_limit(
    rate: int, burst: int, takes: list[tuple[int, int]]
) -> None:
    """Exactly: for each pair of admissions, bytes between them against burst and rate * time."""
    bucket, now = TokenBucket(rate, burst), 12345
    let_through: list[tuple[int, int]] = []
    for nbytes, later in takes:
        now += later
        nbytes = min(nbytes, burst)
        let_through.append((now + bucket.take(nbytes, now), nbytes))
    for i, (begin, _) in enumerate(let_through):
        total = 0
        for end, nbytes in let_through[i:]:
            assert end >= begin  # nobody overtakes
            total += nbytes
            # Times are whole nanoseconds: the first may have been let through a part earlier.
            assert total * 8 <= burst * 8 + Fraction(rate * (end + 1 - begin), 10**9)


def test_the_limit_is_reached() -> None:
    """Who always has something to send gets the whole rate, to the nanosecond."""
    bucket, now, sent = TokenBucket(8_000_000_000, 1000), 0, 0
    for _ in range(5000):
        now += bucket.take(700, now)
        sent += 700
    assert sent - 1000 <= now <= sent  # a byte each nanosecond


def test_more_than_a_burst_at_once_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="burst of 10"):
        TokenBucket(1, 10).take(11, 0)


@given(st.one_of(st.none(), st.floats(1, 1e12)), st.integers(4096, 1 << 30))
def test_pieces_have_a_size_that_can_be_sent(rate: float | None, most: int) -> None:
    size = piece_bytes(rate, most)
    assert 4096 <= size <= most


@pytest.mark.parametrize("limit_gbps", [0.0, 1000.0])
def test_pieces_are_the_bytes_and_who_waits_is_let_go(limit_gbps: float) -> None:
    """An hour's window, and a gate that is found shut in the middle of a shipment."""
    traffic = Traffic(chunk_bytes=4 << 20, limit_gbps=limit_gbps)
    window = traffic._role(3).window
    for iteration in range(6):
        window.sealed(Generation(1, iteration), 3600.0 * iteration - 6 * 3600.0)
    traffic.sealed(3, Generation(1, 6))
    view = memoryview(bytearray(range(256)) * (1 << 18))
    flow = traffic.flow(3, Generation(1, 6), nbytes=len(view), epoch=1)
    pieces = flow.pieces(view, lambda: True)
    got = [bytes(next(pieces))]
    rest = threading.Thread(target=lambda: got.extend(map(bytes, pieces)), daemon=True)
    rest.start()
    rest.join(0.05)
    assert rest.is_alive()  # held back: the last piece is due in a minute
    assert len(got[0]) == 64 << 10
    traffic.waits(3, Generation(1, 6))
    rest.join(20)
    assert not rest.is_alive()
    assert b"".join(got) == bytes(view)
    flow.end(1)
    fit = traffic.committed(3, Generation(1, 6))
    assert 0 < fit.ship_seconds < 20
    assert traffic.fits()[3].window_seconds is not None


def test_the_end_of_an_epoch_ends_a_wait_and_what_it_began_with_has_none() -> None:
    traffic = Traffic(chunk_bytes=4096)
    for iteration in range(6):
        traffic._role(0).window.sealed(Generation(2, iteration), 1e6 + 1000.0 * iteration)
    view, going = memoryview(bytes(10000)), [True]
    held = traffic.flow(0, Generation(2, 5), len(view), epoch=2)
    assert held.schedule is not None
    going[0] = False
    assert list(held.pieces(view, lambda: going[0])) == []
    restored = traffic.flow(0, Generation(1, 5), len(view), epoch=2)
    assert restored.schedule is None
    assert sum(map(len, restored.pieces(view, lambda: True))) == 10000
    traffic.begin()
    assert traffic.flow(0, Generation(2, 5), len(view), epoch=2).schedule is None


_HELD_BYTES = 64 << 20


class MadeInterface(Interface):
    """Half of a link of 1 GB/s is taken by others until ``idle`` is set; ``error``: nobody counts.
    What the vault sends is not on it.
    """

    def __init__(self, *, error: str = "", stated: float = 1e9) -> None:
        super().__init__("made0")
        self._stated = stated
        self.idle = threading.Event()
        self.reads = 0
        self._error = error
        self._sent_bytes = 0

    def bytes_per_second(self) -> float:
        return self._stated

    def sent_bytes(self) -> int:
        if self._error:
            raise OSError(self._error)
        self.reads += 1
        if not self.idle.is_set():
            self._sent_bytes = time.monotonic_ns() // 2
        return self._sent_bytes


@contextlib.contextmanager
def held_shipment(interface: Interface) -> Iterator[tuple[Traffic, threading.Thread, list[int]]]:
    """An hour's window, and a shipment whose last piece is due in a minute at the share it has;
    also the sizes of the pieces that have gone."""
    traffic = Traffic(4 << 20, 0.0, 1e-4, interface, fills_gaps=True)
    for iteration in range(6):
        traffic._role(3).window.sealed(Generation(1, iteration), 3600.0 * (iteration - 6))
    traffic.sealed(3, Generation(1, 6))
    view, gone, going = memoryview(bytes(_HELD_BYTES)), list[int](), [True]
    with traffic.flow(3, Generation(1, 6), len(view), epoch=1) as flow:
        pieces = flow.pieces(view, lambda: going[0])
        rest = threading.Thread(target=lambda: gone.extend(map(len, pieces)), daemon=True)
        rest.start()
        yield traffic, rest, gone
        going[0] = False
        rest.join(20)
        assert not rest.is_alive()


def watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "watch-link"]


def test_copies_wait_for_a_gap_and_take_all_of_it() -> None:
    interface = MadeInterface()
    with held_shipment(interface) as (traffic, rest, gone):
        wait_until(lambda: interface.reads > 30, "the counters are read")
        assert rest.is_alive()
        assert not traffic._is_idle
        assert max(gone) == 64 << 10
        interface.idle.set()
        rest.join(20)
        assert not rest.is_alive()
        assert sum(gone) == _HELD_BYTES
        assert max(gone) == 4 << 20, "few turns of a thread, once nothing is in the way"
    wait_until(lambda: not watchers(), "nobody reads the counters while nothing is shipped")
    with held_shipment(interface) as (_, rest, _):
        rest.join(20)
        assert not rest.is_alive()
    wait_until(lambda: not watchers(), "nor after the next shipment")


def test_who_found_gaps_gives_way_next_time_and_who_did_not_takes_his_share() -> None:
    """Training that sends all the time must not hold up copies until a gate comes near."""
    traffic = Traffic(4 << 20, 0.0, 0.3, MadeInterface(), fills_gaps=True)
    for iteration in range(9):
        traffic._role(3).window.sealed(Generation(1, iteration), 3600.0 * (iteration - 9))
    rates = []
    for iteration, is_idle in ((6, True), (7, False), (8, False)):
        with traffic.flow(3, Generation(1, iteration), 1 << 20, epoch=1) as flow:
            assert flow.schedule is not None
            rates.append(flow.schedule.rate)
            flow.sent_bytes, flow.is_in_gap = 1000, is_idle
            flow.gap_bytes = 501 if is_idle else 500
            flow.end(1)
    assert rates == [pytest.approx(share * 1e9) for share in (0.3, 0.05, 0.3)]


def test_a_link_is_as_fast_as_the_most_that_was_seen_on_it() -> None:
    """Shipments that nothing holds back have to share it with training."""
    traffic = Traffic(4 << 20, 0.0, 1e-4, MadeInterface(stated=0.0), fills_gaps=True)
    traffic._seen = 1e6
    for iteration in range(6):
        traffic._role(3).window.sealed(Generation(1, iteration), 3600.0 * (iteration - 6))

    def speed() -> float:
        link = traffic.link()
        return 0.0 if link is None else link.bytes_per_second

    with traffic.flow(3, Generation(1, 5), 1 << 40, epoch=1):
        wait_until(lambda: speed() > 1e8, "the counters are read")
    wait_until(lambda: not watchers(), "nobody reads on")


def test_without_counters_copies_take_their_share_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with held_shipment(MadeInterface(error="no such counter")) as (traffic, rest, _gone):
        wait_until(lambda: not traffic._fills_gaps, "it is found out")
        wait_until(lambda: not watchers(), "nobody tries again")
        assert rest.is_alive()
        generation = Generation(1, 6)
        with traffic.flow(3, generation, 1 << 20, epoch=1) as flow:
            assert flow.schedule is not None
            assert not watchers()
    texts = [record.getMessage() for record in caplog.records]
    told = "copies do not know when training sends over made0: no such counter"
    assert texts.count(told) == 1


def test_gaps_are_not_looked_for_where_nobody_wants_them() -> None:
    interface = MadeInterface()
    interface.idle.set()
    traffic = Traffic(4 << 20, 0.0, 1e-4, interface)
    for iteration in range(6):
        traffic._role(3).window.sealed(Generation(1, iteration), 3600.0 * (iteration - 6))
    with traffic.flow(3, Generation(1, 5), 1 << 20, epoch=1) as flow:
        assert flow.schedule is not None
        assert not watchers()
    assert interface.reads == 0


def test_a_moment_without_threads_costs_a_shipment_its_gaps_and_no_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is sent is sent by a thread that nobody would start anew in this epoch."""
    refused = short_of_threads(monkeypatch, "watch-link")
    traffic = Traffic(4 << 20, 0.0, 1e-4, MadeInterface(), fills_gaps=True)
    for iteration in range(6):
        traffic._role(3).window.sealed(Generation(1, iteration), 3600.0 * (iteration - 6))
    with traffic.flow(3, Generation(1, 5), 1 << 20, epoch=1) as flow:
        assert flow.schedule is not None
        assert refused
        assert not watchers()
    assert not traffic._flows
    with traffic.flow(3, Generation(1, 5), 1 << 20, epoch=1):
        assert watchers(), "the next one finds a thread"
    wait_until(lambda: not watchers(), "nobody reads the counters while nothing is shipped")


def test_what_copies_have_sent_is_not_training() -> None:
    """Of those under way and of those that are over."""
    traffic, sent = Traffic(4 << 20), [Sent(0.0, 100)]
    with traffic.flow(0, Generation(1, 1), 1, 1, lambda: sent[0]) as flow:
        sent[0] = Sent(0.0, 1100)
        assert (flow.own_bytes(), traffic._own_bytes) == (1000, 0)
    assert traffic._own_bytes == 1000
    cut = traffic.flow(0, Generation(1, 2), 1, 1, lambda: sent[0])
    with contextlib.suppress(ConnectionResetError), cut:
        sent[0] = Sent(0.0, 1300)
        raise ConnectionResetError
    assert (traffic._own_bytes, traffic._flows) == (1200, set())


def test_from_the_seal_to_the_commit() -> None:
    traffic = Traffic(4 << 20)
    traffic.sealed(0, Generation(1, 1))
    fit = traffic.committed(0, Generation(1, 1))
    assert fit.commit_seconds is not None
    assert fit.commit_seconds >= 0
    assert traffic.committed(0, Generation(1, 9)).commit_seconds is None
