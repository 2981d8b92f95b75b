"""The soak's own judgement, and one short soak of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from soaking.growth import Files, Sample, files_verdict, judge  # noqa: E402


def life(part: str, pid: int, grows_mb: float, seconds: int = 3600) -> list[Sample]:
    """A process that is looked at each 10 s and grows so much in all."""
    times = range(0, seconds, 10)
    return [Sample(t, part, pid, 100 + grows_mb * t / seconds, 20, 4) for t in times]


def test_a_leak_is_found_and_a_working_size_is_none() -> None:
    steady = judge([*life("vault", 1, 0.5), *life("agent", 2, 3.0)], 120.0)
    assert steady["flat"]
    leaking = judge([*life("vault", 1, 0.5), *life("coordinator", 2, 60.0)], 120.0)
    assert not leaking["flat"]
    assert 55 < leaking["parts"]["coordinator"]["rss_mb"] < 65
    assert leaking["parts"]["vault"]["lives"] == 1


def test_what_changes_at_once_is_a_working_size_and_a_number_may_be_given_again() -> None:
    spare = [Sample(t, "member", 1, 310 if t < 1800 else 345, 9, 2) for t in range(0, 3600, 10)]
    assert judge(spare, 120.0)["flat"]
    small = [Sample(t, "vault", 2, 30, 8, 4) for t in range(0, 600, 10)]
    large = [Sample(t, "vault", 2, 33, 11, 7) for t in range(4000, 4600, 10)]
    two = judge([*small, *large], 120.0)
    assert two["parts"]["vault"] == {"lives": 2, "rss_mb": 0.0, "descriptors": 0.0, "threads": 0.0}
    each_recovery = [Sample(t, "vault", 3, 30, 8 + t // 200, 4) for t in range(0, 3600, 10)]
    assert not judge(each_recovery, 120.0)["flat"]


def test_a_life_that_is_too_short_is_not_judged() -> None:
    assert judge(life("member", 1, 500.0, seconds=100), 120.0)["parts"] == {}


def test_bytes_of_the_run_directory_per_iteration() -> None:
    files = [Files(t, 10 * t, 5.0, 1.0 + 0.01 * t) for t in range(100)]
    assert files_verdict(files)["directory_bytes_per_iteration"] == pytest.approx(1000.0)
    assert files_verdict(files[:1]) == {}


@pytest.mark.slow
@pytest.mark.full
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    out, plot = tmp_path / "soak.json", tmp_path / "soak.png"
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--minutes", "0.5", "--seed", "3"]
    more = ["--round-iterations", "150", "--keep", str(tmp_path), "--pause", "1", "3"]
    done = subprocess.run(
        [*command, *more, "--out", str(out), "--plot", str(plot)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.read_text())
    assert facts["hashes_compared"] > 0
    assert plot.stat().st_size > 0
