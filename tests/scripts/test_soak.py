"""The soak's own judgement, and one short soak of real processes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.common.programs import check_output

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import soak  # noqa: E402
from soaking import growth, rounds  # noqa: E402
from soaking.growth import Sample, judge  # noqa: E402


def life(part: str, pid: int, grows_mb: float, seconds: int = 3600) -> list[Sample]:
    """A process that is looked at each 10 s and grows so much in all."""
    times = range(0, seconds, 10)
    return [Sample(t, part, pid, 100 + grows_mb * t / seconds, 20, 4) for t in times]


def test_a_leak_is_found_and_a_working_size_is_none():
    steady = judge([*life("vault", 1, 0.5), *life("agent", 2, 3.0)], 120.0)
    assert steady["flat"]
    leaking = judge([*life("vault", 1, 0.5), *life("coordinator", 2, 60.0)], 120.0)
    assert not leaking["flat"]
    assert 55 < leaking["parts"]["coordinator"]["rss_mb"] < 65
    assert leaking["parts"]["vault"]["lives"] == 1
    assert {look["pid"] for look in leaking["grown"]} == {2}
    assert len(leaking["grown"]) == len(life("coordinator", 2, 60.0)), "every look at it"
    assert steady["grown"] == []


def test_what_changes_at_once_is_a_working_size_and_a_number_may_be_given_again():
    spare = [Sample(t, "member", 1, 310 if t < 1800 else 345, 9, 2) for t in range(0, 3600, 10)]
    assert judge(spare, 120.0)["flat"]
    # A vault whose role comes, with parity.
    looks = [*((t, 4) for t in range(0, 90, 6)), (90, 8), (95, 8), (100, 8), (110, 5), (115, 9)]
    looks += [(t, 10) for t in range(120, 212, 6)]
    role = [Sample(t, "vault", 4, 30, 15, count) for t, count in looks]
    assert judge(role, 120.0)["flat"]
    small = [Sample(t, "vault", 2, 30, 8, 4) for t in range(0, 600, 10)]
    large = [Sample(t, "vault", 2, 33, 11, 7) for t in range(4000, 4600, 10)]
    two = judge([*small, *large], 120.0)
    assert two["parts"]["vault"] == {"lives": 2, "rss_mb": 0.0, "descriptors": 0.0, "threads": 0.0}
    each_recovery = [Sample(t, "vault", 3, 30, 8 + t // 200, 4) for t in range(0, 3600, 10)]
    assert not judge(each_recovery, 120.0)["flat"]


def looks(
    bytes_each: float = 1600.0, gains_mb: float = 0.0, seconds: int = 600
) -> list[growth.Files]:
    """Of a round with 4 iterations a second; shared memory goes up and down, and gains so much."""
    return [
        growth.Files(
            t, 4 * t, 11.0 + (t // 5) % 3 + gains_mb * t / seconds, 4 * t * bytes_each / 1e6
        )
        for t in range(0, seconds, 5)
    ]


@pytest.mark.parametrize("grown", ["", "processes", "directory", "memory", "never observed"])
def test_a_soak_passes_only_if_nothing_grew_and_what_was_struck_was_observed(grown):
    files = looks(
        bytes_each=6000.0 if grown == "directory" else 1600.0,
        gains_mb=9.0 if grown == "memory" else 0.0,
    )
    samples = life("vault", 1, 60.0 if grown == "processes" else 0.5)
    one = SimpleNamespace(
        samples=samples, files=files, newest=9, recoveries=0, compared=1, process=None
    )
    struck = [rounds.Struck("cut", "", 1.0, 1, observed=grown != "never observed")]
    facts = soak.summary(struck, [one, one], "", 1.0)
    assert facts["passed"] == (not grown)
    assert ("passed" if facts["passed"] else "FAILED") in soak.verdict(facts)


@pytest.mark.slow
@pytest.mark.full
def test_a_short_soak_finds_nothing(tmp_path):
    out, plot = tmp_path / "soak.json", tmp_path / "soak.png"
    command = (sys.executable, ROOT / "scripts" / "soak.py", "--minutes", "0.5", "--seed", "3")
    more = ["--round-iterations", "150", "--keep", str(tmp_path), "--pause", "1", "3"]
    check_output(*command, *more, "--out", out, "--plot", plot, seconds=280)
    facts = json.loads(out.read_text())
    assert facts["hashes_compared"] > 0
    assert plot.stat().st_size > 0
