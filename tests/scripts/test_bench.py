"""Each case of scripts/bench.py works: none may be broken without notice."""

import json
import sys
from pathlib import Path

import pytest

from tests.common.programs import check_output
from tests.netns.lab.hosts import missing

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench.py"
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402

NEEDS_HOSTS = {"streaming"}


def test_bench_lists_its_cases():
    lines = check_output(sys.executable, BENCH, "--list").splitlines()
    assert [line.split()[0] for line in lines] == bench.CASES
    assert all(line.endswith("?") for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.full(every_time=True)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.netns] if case in NEEDS_HOSTS else [])
        for case in bench.CASES
    ],
)
def test_case_works(tmp_path, case):
    """The first figure of each row is processor time of the threads that protection adds, but in a
    soak, which has no steps to divide it by."""
    if case in NEEDS_HOSTS and (reason := missing()):
        pytest.skip(reason)
    out, plot = tmp_path / "found.json", tmp_path / "found.png"
    files = ("--out", out, "--plot", plot)
    check_output(sys.executable, BENCH, case, "--quick", *files, seconds=560)
    found = json.loads(out.read_text())
    assert found["machine"]["version"]
    assert found["rows"]
    for row in found["rows"]:
        quantity, first = next(iter(row["values"].items()))
        assert quantity.startswith("recovery" if case == "soak" else "own_cpu_seconds")
        assert row["summary"][quantity]["count"] == len(first) > 0
    assert plot.stat().st_size > 10_000
