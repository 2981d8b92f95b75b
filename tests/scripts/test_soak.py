"""One short soak of real processes; calls/soak.txt has its verdicts."""

import json
import sys
from pathlib import Path

import pytest

from tests.common.programs import check_output

ROOT = Path(__file__).parents[2]


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
