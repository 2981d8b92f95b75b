"""Terms: a newer one is seen; and who claims the next one when."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deadpool_megatron.cluster.journal import terms
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import claim_order, claim_term, has_begun_after, sign
from deadpool_megatron.layout.records import EpochRecord, Generation, NodeAddress, Restore, Seat
from deadpool_megatron.settings import Settings

RHYTHM = terms.HeartbeatTiming(beat=0.5, gap=1.0, stall=2.0, alone=2.0)


def test_a_newer_term_is_seen_by_its_entry_and_by_its_sign(tmp_path):
    """Whichever comes first: a host may have noted that there is no entry of that name."""
    journal = Journal(tmp_path)
    claim_term(journal, 1, "10.0.0.4", 2000, 4)
    journal.beat(sign(1, 3))
    assert not has_begun_after(journal, 1)
    journal.beat(sign(2, 0))
    assert has_begun_after(journal, 1)
    journal.beat(sign(1, 4))
    assert not has_begun_after(journal, 1)
    claim_term(journal, 2, "10.0.0.5", 2000, 5)
    assert has_begun_after(journal, 1)
    assert not has_begun_after(journal, 2)
    assert [terms.term_of(beat) for beat in ("", "12 7", "x 1", "-1 2", "\u00b2 1")] == [
        0,
        12,
        0,
        0,
        0,
    ]


def record(training: int, spares: int) -> EpochRecord:
    nodes = {n: NodeAddress("h", 1, f"d{n}", n >= training) for n in range(training + spares)}
    seats = {n: Seat(n, 0, 0) for n in range(training)}
    return EpochRecord(3, seats, nodes, Restore("initial", Generation(0, 0)))


def test_spares_claim_before_nodes_that_train():
    known = record(training=3, spares=2)
    order = sorted(range(6), key=lambda node: claim_order(known, 3, 2, node))
    assert order == [4, 3, 2, 1, 0, 5]
    after = sorted(range(5), key=lambda node: claim_order(known, 3, 2, node, coordinator=4))
    assert after == [3, 2, 1, 0, 4], "the host of the one that is gone may be gone as well"
    swapped = EpochRecord(
        **{**known.__dict__, "nodes": {n: NodeAddress("h", 1, "d", spare=n == 0) for n in range(5)}}
    )
    assert claim_order(swapped, 3, 2, 0) == 0


def test_before_the_first_record_spares_get_time_to_start():
    assert [claim_order(None, 2, 2, node) for node in range(4)] == [13, 12, 1, 0]
    assert [claim_order(None, 2, 0, node) for node in range(2)] == [1, 0]
    assert claim_order(None, 2, 1, 9) == 0, "it has come later"


def test_silence_is_waited_for_unless_nobody_listens():
    succession = terms.Succession(RHYTHM, 3.0, now=0.0)
    succession.look(1, "1 1", 5.0, 5.0)
    succession.look(1, "1 1", 6.0, 6.0)
    assert not succession.is_stale(6.4)
    assert not succession.may_claim(0, refused=True, now=6.4)
    assert succession.is_stale(6.5)
    assert succession.may_claim(0, refused=True, now=6.5)
    assert not succession.may_claim(0, refused=False, now=7.9)
    assert succession.may_claim(0, refused=False, now=8.0)
    assert not succession.may_claim(1, refused=False, now=9.9)
    assert succession.may_claim(1, refused=False, now=10.0)


def test_another_claim_or_sign_of_life_starts_the_clock_anew():
    succession = terms.Succession(RHYTHM, 3.0, now=0.0)
    succession.look(1, "1 1", 0.0, 0.0)
    succession.look(2, "1 1", 2.9, 2.9)
    assert not succession.may_claim(0, refused=True, now=4.3)
    succession.look(2, "2 1", 4.4, 4.4)
    assert not succession.may_claim(0, refused=False, now=7.3)


def test_coordinator_that_is_alone_is_taken_for_gone_before_anybody_is_fenced():
    settings = Settings()
    rhythm = terms.HeartbeatTiming.of(settings)
    assert rhythm.alone + rhythm.beat + rhythm.stall + rhythm.beat < settings.fence_seconds


class SlowJournal(Journal):
    """Takes its time over the sign of life. With the last of the times another term begins."""

    def __init__(self, directory: Path, clock: list[float], times: list[float]) -> None:
        super().__init__(directory)
        self.clock, self.times = clock, times

    def beat(self, text: str) -> None:
        self.clock[0] += self.times.pop(0)
        super().beat(text if self.times else sign(2, 0))


@pytest.mark.parametrize(("seconds", "gaps"), [([0.1, 60.0, 0.1], [160.1]), ([0.1, 0.9, 0.1], [])])
async def test_a_coordinator_whose_journal_hung_trusts_no_silence_of_that_time(
    tmp_path, monkeypatch, seconds, gaps
):
    clock, found, newer = [100.0], list[float](), list[str]()
    monkeypatch.setattr(terms, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    journal = SlowJournal(tmp_path, clock, seconds)
    claim_term(journal, 1, "10.0.0.4", 2000, 4)
    rhythm = replace(RHYTHM, beat=0.001)
    life = terms.SignOfLife(
        journal, 1, rhythm, lambda: True, found.append, newer.append, pytest.fail
    )
    await life.run()
    life.close()
    assert found == pytest.approx(gaps)
    assert newer == ["term 2 has begun"]
