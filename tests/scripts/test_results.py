"""Figures name the commit on which they were measured, and pages have the measured figures."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import __version__

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results"
#: Made once, exempt from the rule of age.
HISTORY = tomllib.loads((RESULTS / "history.toml").read_text())
#: Older than the previous minor version, or of a commit that is gone: to be made again. It may only
#: become shorter; so may STALE_NUMBERS.
STALE = {"coordinator-4096.json"}
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
#: Numbers of pages that the result linked there does not have.
STALE_NUMBERS: dict[str, str] = {}
#: Those of versions are no measurements.
LINK = re.compile(r"(?:scripts/bench/results|simulated)/((?!conformance)[\w.-]+\.json)\b")
# A number with decimals, no part of a version.
NUMBER = re.compile(r"(?<![\w.-])(\d[\d,]*\.\d+)(?![\w]|\.\d)")
UNITS = {"ms": 1e3, "M": 1e-6, "GB": 1e-9, "%": 100.0, "": 1.0}


def trees(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a result that name a commit."""
    if isinstance(value, dict) and isinstance(value.get("commit"), str):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            yield from trees(part)


def numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of a result."""
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def minor(version: str) -> int:
    """Return a version as a number of minor versions."""
    major, second, *_ = version.split(".")
    return 100 * int(major) + int(second)


def is_of_this_history(tree: dict[str, Any]) -> bool:
    """Return whether a result is of a clean ancestor of this commit, and new enough."""
    commit = tree["commit"]
    shown = git("show", f"{commit}:deadpool_megatron/__init__.py").stdout
    known = re.search(r'__version__ = "(.+)"', shown)
    return (
        not tree.get("changed_files", 0)
        and git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
        and known is not None
        and minor(known[1]) >= minor(__version__) - 1
    )


def test_current_figures_are_of_a_clean_commit_of_this_or_the_previous_version():
    if git("rev-parse", "--is-shallow-repository").stdout != "false\n":
        pytest.skip("this checkout has no history")
    files = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    assert files.keys() >= HISTORY.keys() | STALE
    found = {
        name
        for name, result in files.items()
        if not (known := list(trees(result))) or not all(map(is_of_this_history, known))
    }
    assert found - HISTORY.keys() == STALE


def scopes(text: str) -> Iterator[tuple[set[str], str]]:
    """Yield the names of results, and the text in whose numbers they are: a paragraph, with the
    table after it."""
    paragraphs = re.split(r"\n\s*\n", text)
    for paragraph, after in zip(paragraphs, [*paragraphs[1:], ""], strict=True):
        if names := set(LINK.findall(paragraph)):
            yield names, paragraph + "\n" + (after if after.startswith("|") else "")


def lacks(text: str, known: set[float]) -> Iterator[str]:
    """Yield the numbers of a text that no measured number becomes by rounding, in a unit of its
    line."""
    for line in text.splitlines():
        scales = [scale for unit, scale in UNITS.items() if unit in line]
        for found in NUMBER.findall(line):
            digits, shown = len(found.partition(".")[2]), float(found.replace(",", ""))
            if not any(round(v * scale, digits) == shown for v in known for scale in scales):
                yield found


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_pages_are_those_of_the_results_they_link(page):
    found = []
    for names, text in scopes((ROOT / page).read_text()):
        paths = (
            folder / name for name in names for folder in (RESULTS, ROOT / "docs" / "simulated")
        )
        results = [json.loads(path.read_text()) for path in paths if path.exists()]
        known = {number for result in results for number in numbers(result)}
        found += lacks(LINK.sub("", text), known)
    assert " ".join(found) == STALE_NUMBERS.get(page, "")


def measured(file: str) -> Iterator[list[str]]:
    """Yield the cells of a table of other systems: step over unprotected, kill to next new step."""
    facts = json.loads((RESULTS / file).read_text())
    if "sizes" in facts:  # before the rows of all cases had one form
        sides = [
            side.get("ratio") and (side["ratio"], side["seconds_to_new_step"]["mean"])
            for side in facts["sizes"]["5M"]["sides"].values()
        ]
    else:
        sides = [
            row["ratios"]
            and (
                row["ratios"]["step_over_plain"]["mean"],
                row["summary"]["seconds_to_new_step"]["mean"],
            )
            for row in facts["rows"]
            if row["row"] != "undisturbed"
        ]
    for side in sides:
        yield [f"{side[0]:.2f}", f"{side[1]:.1f} s"] if side else ["", ""]


@pytest.mark.parametrize(
    ("page", "place", "file"),
    [("README.md", 0, "peers-cpu.json"), ("docs/figures.md", 0, "peers-node-cpu.json")],
)
def test_tables_have_the_measured_figures(page, place, file):
    """Row by row: step over unprotected, and kill to next new step."""
    tables = re.findall(
        r"^\| \| step over unprotected \|.*\n\|.*\n((?:\|.*\n)+)",
        (ROOT / page).read_text(),
        re.MULTILINE,
    )
    rows = [line.replace("*", "").split("|")[2:4] for line in tables[place].splitlines()]
    assert [[cell.strip() for cell in row] for row in rows] == list(measured(file))
