"""One short soak of real processes, and the verdict on growth; calls/soak.txt has its verdicts."""

import json
import sys
from pathlib import Path

import pytest

from tests.common.programs import check_output

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from soaking import growth  # noqa: E402


@pytest.mark.slow
@pytest.mark.full
def test_short_soak_passes(tmp_path):
    out, plot = tmp_path / "soak.json", tmp_path / "soak.png"
    command = (sys.executable, ROOT / "scripts" / "soak.py", "--minutes", "0.5", "--seed", "3")
    more = ["--round-iterations", "150", "--keep", str(tmp_path), "--pause", "1", "3"]
    check_output(*command, *more, "--out", out, "--plot", plot, seconds=280)
    facts = json.loads(out.read_text())
    assert facts["hashes_compared"] > 0
    assert plot.stat().st_size > 0


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
