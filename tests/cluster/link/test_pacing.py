"""Rhythms that follow the size of the cluster."""

from __future__ import annotations

from collections import Counter

import pytest

from deadpool_megatron.cluster.link.pacing import (
    Pace,
    acknowledge_seconds,
    answer_seconds,
    beat_seconds,
    contact_seconds,
    hang_look_seconds,
    is_told,
)
from deadpool_megatron.settings import Settings


def test_small_clusters_beat_as_the_setting_says_and_large_ones_share() -> None:
    settings = Settings(fence_seconds=6.0, node_silence_seconds=8.0, takeover_seconds=3.0)
    assert beat_seconds(64, settings) == settings.beat_interval_seconds
    assert beat_seconds(2000, settings) == 0.5
    assert beat_seconds(4096, settings) == beat_seconds(100_000, settings) == 1.0


@pytest.mark.parametrize("agents", [2, 400, 4096, 100_000])
@pytest.mark.parametrize("fence_seconds", [1.2, 3.0, 6.0])
def test_a_late_beat_casts_no_doubt_on_contact(agents: int, fence_seconds: float) -> None:
    settings = Settings(
        fence_seconds=fence_seconds,
        node_silence_seconds=fence_seconds * 4 / 3,
        freeze_seconds=1.0,
        takeover_seconds=fence_seconds,
    )
    beat = beat_seconds(agents, settings)
    # The newest acknowledged beat is at most so old while all is well.
    assert beat + min(beat, acknowledge_seconds(settings)) <= contact_seconds(beat, settings)
    assert 2 * contact_seconds(beat, settings) < settings.fence_seconds
    # As long for the handshake of the second greeting as for the answer to the first.
    assert 2 * answer_seconds(settings) < settings.fence_seconds


def test_hangs_are_looked_for_far_more_often_than_they_are_found() -> None:
    assert hang_look_seconds(Settings()) == 2.0
    assert hang_look_seconds(Settings(hang_seconds=20.0)) == 1.0


def test_routine_events_of_a_large_run_come_from_other_roles_each_time() -> None:
    assert all(is_told(role, 7, 512) for role in range(512))
    told = Counter(
        role for iteration in range(64) for role in range(32768) if is_told(role, iteration, 32768)
    )
    assert set(told.values()) == {1}
    assert len(told) == 32768


def test_who_asks_a_moment_early_need_not_wait_a_whole_period() -> None:
    pace = Pace(1.0)
    assert pace.is_due(100.0)
    assert not pace.is_due(100.9)
    assert pace.is_due(100.99)
    assert not pace.is_due(101.5)
