"""Generated slips: their draw, their tests, and the share that has to be noticed."""

import functools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.common.programs import check_output
from tests.conftest import commit

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "mutants")]

import coverage_map  # noqa: E402
import draw  # noqa: E402
import mutate  # noqa: E402
from operators import changes  # noqa: E402

MAP = ROOT / "tests" / "mutants" / "generated" / "coverage.json"
SCORE = MAP.with_name("score.toml")


@pytest.mark.slow
def test_draw_repeats_and_follows_the_sizes_of_packages(monkeypatch):
    monkeypatch.setattr(draw, "changes", functools.cache(changes))
    drawn = draw.draw(12, "a seed", ROOT)
    assert drawn == draw.draw(12, "a seed", ROOT)
    assert drawn[:1] != draw.draw(1, "another", ROOT)
    packages = [Path(file).parts[1] for file, _ in drawn]
    assert len(drawn) == 12
    assert packages.count("cluster") > packages.count("vault") > 0


def test_map_names_existing_tests():
    """Record it again with scripts/mutate.py --map when a tenth of them is gone."""
    tests = {test for names in coverage_map.read(MAP).values() for test in names}
    slip = mutate.Slip("all", "", "", "", "", tuple(tests))
    assert len(mutate.missing_tests(slip)) < len(tests) / 10


def test_score_does_not_fall_below_that_of_the_last_release():

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    tag = git("describe", "--tags", "--abbrev=0").strip()
    before = tomllib.loads(git("show", f"{tag}:{SCORE.relative_to(ROOT)}"))
    assert tomllib.loads(SCORE.read_text())["noticed"] >= before.get("noticed", 0.0)


@pytest.fixture
def tree(tmp_path):
    """A package of one function, and a test that checks one of its results."""
    files = {
        "deadpool_megatron/__init__.py": "",
        "deadpool_megatron/layout/gate.py": (
            "def passes(epoch, newest):\n    if epoch < newest:\n        return False\n"
            "    return True\n"
        ),
        "tests/test_gate.py": (
            "import pytest\n\nfrom deadpool_megatron.layout.gate import passes\n\n\n"
            '@pytest.mark.parametrize("epoch", [2])\n'
            "def test_gate(epoch):\n    assert passes(epoch, 1)\n"
        ),
        "tests/mutants/generated/score.toml": "noticed = 1.0\n",
        "tests/mutants/generated/coverage.json": (
            '{"tests":{"tests/test_gate.py":["test_gate[case_that_is_gone]","test_gate[2]",'
            '"test_that_is_gone"]},"lists":[[0,1,2]],"functions":{"layout/gate.py":{"passes":0}}}'
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


@pytest.mark.slow
def test_generate_prints_unnoticed_slips_in_the_form_of_known_slips(tree):
    """No test checks equal epochs. A result that is missing, inverted or false is noticed."""
    command = [sys.executable, str(ROOT / "scripts" / "mutate.py"), "--root", str(tree)]
    done = subprocess.run(
        [*command, "--generate", "6", "--seed", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    survivors = tomllib.loads(done.stdout[: done.stdout.rindex("6 slips in")])["slip"]
    assert {slip["new"].strip() for slip in survivors} == {
        "if epoch <= newest:",
        "pass",
        "return True",
    }


@pytest.mark.slow
def test_slip_that_ends_the_whole_run_is_noticed(tree):
    """It ends with the status of failed tests, but names none."""
    (tree / "slips").mkdir()
    (tree / "slips" / "some.toml").write_text(
        '[[slip]]\nid = "ends"\nfile = "deadpool_megatron/layout/gate.py"\nold = "return True"\n'
        'new = "__import__(\'os\')._exit(1)"\nmeans = "it ends"\ntests = ["tests/test_gate.py"]\n'
    )
    command = (sys.executable, ROOT / "scripts" / "mutate.py", "--root", tree)
    assert '"noticed"' in check_output(*command, "--slips", tree / "slips", "--json")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.full(every_time=True)
def test_generated_slips_are_noticed_at_the_known_share():
    """Each commit draws other slips."""
    command = (sys.executable, ROOT / "scripts" / "mutate.py", "--generate", "60")
    check_output(*command, "--seed", commit(), seconds=1500)
