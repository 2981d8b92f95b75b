"""Known slips of the package are noticed: all fit the files as they are, and some are tried."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import commit

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import mutate  # noqa: E402

FILE = "deadpool_megatron/layout/descriptions.py"
TESTS = "tests/layout/test_records.py"
NUMBER, COMMENT = "_SHORTEST_RUN = 3", "# At least this many roles"
# The old text, the new text, the tests, and the outcome.
TRIALS = {
    "wrong": (
        NUMBER,
        "_SHORTEST_RUN = 2",
        "tests/layout/test_calls.py::test_calls_are_answered_as_before[words]",
        "noticed",
    ),
    "idle": (COMMENT, "# As many roles", TESTS, "survived"),
    "broken": (NUMBER, "raise SystemError", TESTS, "not tried"),
    "moved": ("no such text", "", TESTS, "not tried"),
    "untested": (NUMBER, "_SHORTEST_RUN = 2", f"{TESTS}::test_that_is_gone", "not tried"),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "mutate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("slip", mutate.load(), ids=lambda slip: slip.id)
def test_slip_fits_its_file_and_has_its_tests(slip):
    assert slip.applied() != (ROOT / slip.file).read_text()
    assert mutate.missing_tests(slip) == []


@pytest.mark.slow
def test_mutate_names_slips_that_were_not_noticed_or_not_tried(tmp_path):
    """The working tree stays as it is."""
    before = (ROOT / FILE).read_text()
    slips = [
        f'[[slip]]\nid = "{name}"\nfile = "{FILE}"\nold = "{old}"\nnew = "{new}"\n'
        f'means = "a slip of a test"\ntests = ["{test}"]\n'
        for name, (old, new, test, _) in TRIALS.items()
    ]
    (tmp_path / "some.toml").write_text("".join(slips))
    all_of_them = run("--slips", str(tmp_path), "--json")
    assert all_of_them.returncode == 2, all_of_them.stderr
    found = {trial["slip"]["id"]: trial["outcome"] for trial in json.loads(all_of_them.stdout)}
    assert found == {name: outcome for name, (*_, outcome) in TRIALS.items()}
    two = run("--slips", str(tmp_path), "wrong", "idle")
    assert two.returncode == 1
    assert f"survived  idle  {FILE}: a slip of a test" in two.stdout
    assert "1 noticed" in two.stdout
    assert (ROOT / FILE).read_text() == before


@pytest.mark.slow
@pytest.mark.full(every_time=True)
def test_slips_drawn_at_random_are_noticed():
    """Each commit draws other slips."""
    done = run("--draw", "30", "--seed", commit())
    assert done.returncode == 0, done.stdout
