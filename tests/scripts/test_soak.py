"""The verdict of a soak on growth; calls/soak.txt has its others."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

from soaking import growth  # noqa: E402


@pytest.mark.parametrize(
    ("threads", "is_flat"),
    [
        (lambda look: 40 + look // 30, False),  # ten more in each hour
        (lambda look: min(43, 37 + look // 2), True),
        (lambda _: 43, True),
    ],
    ids=["a leak", "a slow start", "neither"],
)
def test_only_what_goes_on_is_a_leak(threads, is_flat):
    times = range(300)  # an hour
    looks = [growth.Sample(12.0 * look, "member", 1, 300.0, 28, threads(look)) for look in times]
    assert growth.judge(looks, 120.0)["flat"] is is_flat
