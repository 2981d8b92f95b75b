"""The timing of terms; their entries and claims are in calls/journal.txt."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deadpool_megatron.cluster.journal import terms
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import claim_term, sign
from deadpool_megatron.settings import Settings

RHYTHM = terms.HeartbeatTiming(beat=0.5, gap=1.0, stall=2.0, alone=2.0)


def test_isolated_coordinator_is_replaced_before_agents_fence_themselves():
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
async def test_coordinator_concludes_nothing_from_silence_while_its_journal_hung(
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
