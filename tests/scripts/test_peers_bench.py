"""The arithmetic of scripts/bench/peers.py, and that its command line works; no training here."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from other_systems import outcomes  # noqa: E402
from other_systems.outcomes import StepReport as Report  # noqa: E402


def report(iteration: int, wall_seconds: float, loss: str = "0x1p+0") -> object:
    return Report(iteration, loss, wall_seconds)


def test_reports_are_read_up_to_the_line_being_written() -> None:
    line = '{"iteration": 3, "loss": "0x1.8p+1", "wall_seconds": 7.5}\n'
    assert outcomes.parse_reports([line, line[:20]]) == [Report(3, "0x1.8p+1", 7.5)]
    with pytest.raises(outcomes.OutcomeError, match="not a report"):
        outcomes.parse_reports(['{"iteration": 3}\n', line])


def test_a_restart_from_an_old_checkpoint_costs_what_it_computes_again() -> None:
    # One second per step; killed in step 5, goes on from the checkpoint of step 2.
    before = [report(n, float(n)) for n in range(1, 5)]
    after = [report(n, 20.0 + n) for n in range(3, 8)]
    found = outcomes.outcome([*before, *after], 4.5, 1.0)
    assert found.newest_before == 4
    assert found.steps_recomputed == 2
    # Step 5 is the first new one; steps 5 to 7 would have taken until 7.
    assert found.seconds_to_new_step == 20.5
    assert found.seconds_lost == 20.0


@pytest.mark.parametrize(
    ("page", "place", "file"),
    [
        ("README.md", 0, "peers-cpu.json"),
        ("docs/figures.md", 0, "peers-node-cpu.json"),
    ],
)
def test_the_tables_say_what_was_measured(page: str, place: int, file: str) -> None:
    """Row by row: step over unprotected, and kill to next new step."""
    facts = json.loads((BENCH / "results" / file).read_text())["sizes"]["5M"]["sides"]
    measured = [
        [f"{side['ratio']:.2f}", f"{side['seconds_to_new_step']['mean']:.1f} s"]
        if "ratio" in side
        else ["", ""]
        for side in facts.values()
    ]
    tables = re.findall(
        r"^\| \| step over unprotected \|.*\n\|.*\n((?:\|.*\n)+)",
        (ROOT / page).read_text(),
        re.MULTILINE,
    )
    rows = [line.replace("*", "").split("|")[2:4] for line in tables[place].splitlines()]
    assert [[cell.strip() for cell in row] for row in rows] == measured
