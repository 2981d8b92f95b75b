"""Figures name the commit on which they were measured, and pages have the measured figures."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results"
#: Measured before this check; to be removed when measured again.
OLD = {
    *("coordinator-4096.json", "local-twice-5M-cpu.json", "peers-node-cpu.json"),
    *("rebuild-asleep-cpu.json", "rebuild-cpu.json", "store.json", "streaming-cpu.json"),
    *("streaming-gaps-cpu.json", "walk-before.json"),
}


def trees(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the commits that a result names, each with the number of uncommitted files."""
    if isinstance(value, list):
        for part in value:
            yield from trees(part)
    elif isinstance(value, dict):
        if isinstance(value.get("commit"), str):
            yield value["commit"], value.get("changed_files", 0)
        for part in value.values():
            yield from trees(part)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_results_name_clean_commits_of_this_history():
    if git("rev-parse", "--is-shallow-repository").stdout != "false\n":
        pytest.skip("this checkout has no history")
    known = {path.name: set(trees(json.loads(path.read_text()))) for path in RESULTS.glob("*.json")}
    loose = {
        name
        for name, found in known.items()
        if not found
        or any(
            changed or git("merge-base", "--is-ancestor", commit, "HEAD").returncode
            for commit, changed in found
        )
    }
    assert loose == OLD


@pytest.mark.parametrize(
    ("page", "place", "file"),
    [("README.md", 0, "peers-cpu.json"), ("docs/figures.md", 0, "peers-node-cpu.json")],
)
def test_tables_have_the_measured_figures(page, place, file):
    """Row by row: step over unprotected, and kill to next new step."""
    facts = json.loads((RESULTS / file).read_text())["sizes"]["5M"]["sides"]
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
