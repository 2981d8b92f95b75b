"""Slips that are generated: which ones, with which tests, and how many have to be noticed."""

import functools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.common.programs import check_output
from tests.conftest import commit

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import mutate  # noqa: E402
from mutating import coverage_map, draw  # noqa: E402
from mutating.operators import changes  # noqa: E402

MAP = ROOT / "tests" / "mutants" / "generated" / "coverage.json"
SCORE = MAP.with_name("score.toml")
MODULE = '''"""Text: 1 + 1."""

import os

_LIMIT = 2
_WAIT_SECONDS = 2
_MAX_TRIES = 2


@decorated(True)
class Door:
    """A door."""

    tries: int = 3

    def open(self, key: "int | None" = 1) -> bool:
        """Open."""
        assert key is not None
        print("opens", 1 + 1)
        if key == 1 and self.shut:
            self.unlock(key, timeout=5)
            self.swing()
            return True
        for one in range(_LIMIT):
            if one > 0:
                raise ValueError(f"{one + 1} times")
            self.seen.add(one)
            self.tried.append(one)
        self.count += 1
        if failpoints.ACTIVE and key:
            self.hit(1)
        while self.now < self.until_seconds:
            self.seen.clear()
            self.tried.clear()
        return self.hinge(lambda: not key)

    def __str__(self) -> str:
        return "a" if self.count > 1 else "b"
'''
SLIPS = {
    ("number", "", "2", "3"),
    ("swap_op", "Door.open", " == 1", " != 1"),
    ("number", "Door.open", "1", "2"),
    ("swap_op", "Door.open", "key == 1 and self.shut", "key == 1 or self.shut"),
    ("weaken", "Door.open", "key == 1 and self.shut", "(key == 1)"),
    ("weaken", "Door.open", "key == 1 and self.shut", "(self.shut)"),
    ("invert", "Door.open", "key == 1 and self.shut", "(not (key == 1 and self.shut))"),
    (
        *("exchange", "Door.open", "self.unlock(key, timeout=5)\n            self.swing()"),
        "self.swing()\n            self.unlock(key, timeout=5)",
    ),
    ("drop", "Door.open", "self.unlock(key, timeout=5)", "pass"),
    ("drop", "Door.open", "self.swing()", "pass"),
    ("drop", "Door.open", "return True", "pass"),
    ("name", "Door.open", "True", "False"),
    ("invert", "Door.open", "one > 0", "(not (one > 0))"),
    ("swap_op", "Door.open", " > 0", " >= 0"),
    ("number", "Door.open", "0", "1"),
    ("drop", "Door.open", 'raise ValueError(f"{one + 1} times")', "pass"),
    ("drop", "Door.open", "self.seen.add(one)", "pass"),
    ("drop", "Door.open", "self.tried.append(one)", "pass"),
    ("drop", "Door.open", "self.count += 1", "pass"),
    ("augmented_assignment", "Door.open", "self.count += 1", "self.count = 1"),
    ("swap_op", "Door.open", "self.count += 1", "self.count -= 1"),
    (
        *("invert", "Door.open", "self.now < self.until_seconds"),
        "(not (self.now < self.until_seconds))",
    ),
    ("drop", "Door.open", "self.seen.clear()", "pass"),
    ("drop", "Door.open", "self.tried.clear()", "pass"),
    ("remove_unary_ops", "Door.open", "not key", "key"),
}


def test_slips_are_made_where_they_matter():
    """Not in texts, types, decorators, defaults, times, what only tests do, or limits that tune;
    nor of two changes in any order."""
    found = {(c.kind, c.function, MODULE[c.begin : c.end], c.text) for c in changes(MODULE)}
    assert found == SLIPS


def test_each_slip_fits_its_module():
    for change in changes(MODULE):
        old, new = change.texts(MODULE)
        assert MODULE.count(old) == 1
        changed = MODULE.replace(old, new)
        assert changed != MODULE
        compile(changed, "door.py", "exec")


def test_tests_that_are_recorded_again_come_first():
    before = {"vault/a.py:f": ["t.py::quick", "u.py::before"], "vault/a.py:g": ["t.py::quick"]}
    found = coverage_map.joined(before, {"vault/a.py:f": ["u.py::newer"]}, ["u.py"])
    assert found == {**before, "vault/a.py:f": ["u.py::newer", "t.py::quick"]}


def test_a_draw_repeats_and_takes_each_room_by_its_lines(monkeypatch):
    monkeypatch.setattr(draw, "changes", functools.cache(changes))
    drawn = draw.draw(12, "a seed", ROOT)
    assert drawn == draw.draw(12, "a seed", ROOT)
    assert drawn[:1] != draw.draw(1, "another", ROOT)
    rooms = [Path(file).parts[1] for file, _ in drawn]
    assert len(drawn) == 12
    assert rooms.count("cluster") > rooms.count("vault") > 0


@pytest.mark.parametrize(
    ("noticed", "drawn", "share", "falls_short"),
    [
        (60, 60, 0.8, False),
        (40, 60, 0.8, False),
        (39, 60, 0.8, True),
        (80, 100, 0.8, False),
        (0, 60, 0.0, False),
        (30, 30, 1.0, False),
        (29, 30, 1.0, True),
    ],
)
def test_only_what_chance_does_not_explain_falls_short(noticed, drawn, share, falls_short):
    """Of 60 slips at a share of 0.8, fewer than 40 are noticed once in 150 draws."""
    assert draw.falls_short(noticed, drawn, share) is falls_short


def test_the_map_is_of_the_tests_that_are_there():
    """Anew when one in ten is gone: scripts/mutate.py --map."""
    tests = {test for names in coverage_map.read(MAP).values() for test in names}
    slip = mutate.Slip("all", "", "", "", "", tuple(tests))
    assert len(mutate.missing_tests(slip)) < len(tests) / 10


def test_the_score_only_rises():
    """Above that of the last release, as ceilings fall."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    tag = git("describe", "--tags", "--abbrev=0").strip()
    before = tomllib.loads(git("show", f"{tag}:{SCORE.relative_to(ROOT)}"))
    assert tomllib.loads(SCORE.read_text())["noticed"] >= before.get("noticed", 0.0)


@pytest.fixture
def tree(tmp_path):
    """A package of one function, and a test that enters it and looks at one of its results."""
    files = {
        "deadpool_megatron/__init__.py": "",
        "deadpool_megatron/layout/gate.py": (
            "def passes(epoch, newest):\n    if epoch < newest:\n        return False\n"
            "    return True\n"
        ),
        "tests/test_gate.py": (
            "from deadpool_megatron.layout.gate import passes\n\n\n"
            "def test_gate():\n    assert passes(2, 1)\n"
        ),
        "tests/mutants/generated/score.toml": "noticed = 1.0\n",
        "tests/mutants/generated/coverage.json": (
            '{"tests":{"tests/test_gate.py":["test_gate","test_that_is_gone"]},'
            '"lists":[[0,1]],"functions":{"layout/gate.py":{"passes":0}}}'
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


@pytest.mark.slow
def test_what_no_test_notices_is_written_as_a_known_slip(tree):
    """Equality passes or not: no test says. That a result is gone, inverted or false is noticed."""
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
def test_a_slip_that_ends_the_whole_run_is_noticed(tree):
    """With the status of failed tests, and not one of them named."""
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
def test_of_generated_slips_as_many_are_noticed_as_before():
    """Others at each commit."""
    command = (sys.executable, ROOT / "scripts" / "mutate.py", "--generate", "60")
    check_output(*command, "--seed", commit(), seconds=1500)
