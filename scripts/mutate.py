#!/usr/bin/env python
"""Make known slips in the package, each alone, and name those that no test notices.

    .venv/bin/python scripts/mutate.py                     # all but slow slips
    .venv/bin/python scripts/mutate.py --draw 30 --seed 7
    .venv/bin/python scripts/mutate.py restore7 left5
    .venv/bin/python scripts/mutate.py --generate 60 --seed 7    # new slips
    .venv/bin/python scripts/mutate.py --map tests/vault/test_pace.py    # after they were changed

A slip is a few words of a file as they are, the same as they could have been by mistake or were
before a fault was mended, and the tests that have to notice (tests/mutants/*.toml). It is made in a
copy of this tree; its tests run there, in a fork of this process, which has imported pytest and
torch once. Processes that tests start import from the copy as well.

A slip is noticed when any of its tests fails; the first that does ends its run. A test that does
not end within its time counts as failed, and is shown as "by time": an assertion is better.

--generate draws slips from the layout, the vault, the hooks, the cluster, the communicators and the
exports, and tries each with the tests that enter its function, as --map has recorded them. A slip
that no test notices is printed in the form of a known slip. The score of record is in
tests/mutants/generated/score.toml.

Exit status: 0 each slip was noticed; 1 some were not, or fewer generated slips than chance
explains; 2 bad arguments, or a slip that could not be tried: its text is not in its file exactly
once, its tests are not there or were all skipped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PLACES = [str(ROOT / name) for name in ("scripts", "scripts/bench", "tests/mutants")]
sys.path[:0] = _PLACES

import coverage_map  # noqa: E402
import draw  # noqa: E402
from common.termination import marked_processes, orderly_termination  # noqa: E402
from known_slips import SLIPS, Slip, load, missing_tests  # noqa: E402

# Of generated slips, below the tree's root.
_GENERATED = Path("tests", "mutants", "generated")
_MARK = "DEADPOOL_MUTATE"
# Limits of a test and of a test of a slow slip, and the excess after which a run counts as hung.
_TEST_SECONDS = 30
_SLOW_TEST_SECONDS = 240
_SPARE_SECONDS = 60
# No test of a generated slip begins later.
_GENERATED_SECONDS = 75
# The imports of the forks: nothing of the package, which each fork imports from its copy, nor of
# Megatron, which needs its stand-ins for a CPU first.
_IMPORTED = ("pytest", "hypothesis.stateful", "torch.distributed.tensor", "wandb")
# The sign, for generated slips, that the tests or their helpers could not be imported.
_NO_IMPORT = re.compile(r"while importing|loading conftest|(during|ERROR) collect")
# No test failed, and no process was left over: the shared memory may be that of another session.
_LEFT_SEGMENTS = re.compile(r"^=+ left over by this session.*\n(?!process )", re.MULTILINE)
_ENDED = (2, 3)  # the exit status where something ended the run, or raised outside of any test
_FAILED_TESTS = 1  # pytest's exit status; 2 and above: it could not run them


@dataclass
class Trial:
    """A slip on its way: how it ended, and the test that noticed it."""

    slip: Slip
    outcome: str = "survived"
    by: str = ""
    began_seconds: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


def generate(count: int, seed: str, root: Path = ROOT) -> list[Slip]:
    """Slips that are drawn from the core, with the tests that enter their functions."""
    functions = coverage_map.read(root / _GENERATED / "coverage.json")
    slips = []
    for file, change in draw.draw(count, seed, root):
        old, new = change.texts((root / file).read_text())
        name = f"{Path(file).parts[1]}-{sha256(f'{file}{old}{new}'.encode()).hexdigest()[:8]}"
        means = f"{change.kind} in {change.function or 'the module'}"
        tests = draw.tests_of(file, change.function, functions)
        slip = Slip(name, file, old, new, means, budget_seconds=_GENERATED_SECONDS, tests=tests)
        gone = missing_tests(slip, root)
        slips.append(replace(slip, tests=tuple(test for test in tests if test not in gone)))
    return slips


class _NoShrinking:
    """The first example that hypothesis finds suffices. It tries many, the same in each run."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutate", deadline=None, max_examples=150, phases=phases, database=None
        )
        settings.load_profile("mutate")


class _Budget:
    """Runs the tests of a generated slip that are still there, and skips what begins too late."""

    def __init__(self, slip: Slip) -> None:
        self._tests = slip.tests
        self._end_seconds = time.monotonic() + slip.budget_seconds

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        names = [(item.nodeid, item.nodeid.split("[")[0], item) for item in items]
        items[:] = [item for test in self._tests for *name, item in names if test in name]

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._end_seconds:
            import pytest

            pytest.skip("begins too late")


class Copy:
    """A copy of the tree, in which slips are made and run, each alone."""

    def __init__(self, directory: Path, root: Path = ROOT) -> None:
        self.tree = directory / "tree"
        self._output = directory / "output"
        self._scratch = directory / "t"
        self._before = directory / "before"
        self._changes = 0
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        self.tree.mkdir(parents=True)
        for name in {Path(path).parts[0] for path in listed}:
            if (root / name).is_dir():  # with the compiled modules, which are current
                shutil.copytree(root / name, self.tree / name, symlinks=True)
            elif (root / name).is_file():
                shutil.copy2(root / name, self.tree / name)

    def start(self, slip: Slip, text: str) -> int:
        """Start a slip's tests; returns the process, which leads a session of its own."""
        path = self.tree / slip.file
        shutil.copy2(path, self._before)
        path.write_text(text)
        # Compiled modules are distinguished by seconds and size, which two quick slips may share.
        self._changes += 1
        os.utime(path, (self._changes, self._changes))
        pid = os.fork()
        if pid == 0:
            self._run(slip)
        return pid

    def _run(self, slip: Slip) -> None:
        """Become the tests. Does not return."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number in (1, 2):
            os.dup2(output, number)
        status = 3
        try:
            os.chdir(self.tree)
            sys.path[:] = [str(self.tree), *(p for p in sys.path if p not in _PLACES)]
            os.environ.update({"PYTHONPATH": str(self.tree), _MARK: str(self.tree)})
            import pytest

            limit = _SLOW_TEST_SECONDS if slip.slow else slip.budget_seconds or _TEST_SECONDS
            options = ["-x", "--no-header", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
            options += [f"--timeout={limit}", f"--basetemp={self._scratch}"]
            plugins: list[object] = [_NoShrinking()]
            tests = slip.tests
            if slip.budget_seconds:  # the map may name a case that is gone, which is an error
                plugins.append(_Budget(slip))
                tests = tuple({test.split("[")[0]: None for test in tests})
            status = int(pytest.main([*options, *tests], plugins=plugins))
            sys.stdout.flush()
        finally:
            os._exit(status)

    def judge(self, trial: Trial, status: int) -> None:
        """Write down how the tests ended, and put the file back."""
        text = self._output.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
        if status == _FAILED_TESTS and failed:
            late = "from pytest-timeout" in text
            trial.outcome, trial.by = "by time" if late else "noticed", failed[1]
        elif status == _FAILED_TESTS and _LEFT_SEGMENTS.search(text):
            trial.by = "no test failed, but something was left over"
        elif status == _FAILED_TESTS:
            trial.outcome, trial.by = "noticed", "the whole run, which ended or left a process"
        elif status < 0:
            trial.outcome, trial.by = "by time", f"the whole run (signal {-status})"
        elif trial.slip.budget_seconds and (status in _ENDED or _NO_IMPORT.search(text)):
            trial.outcome, trial.by = "noticed", f"the whole run (status {status})"
        elif status or not (trial.slip.budget_seconds or re.search(r"\d passed", text)):
            trial.outcome, trial.by = "not tried", text[-2000:]
        shutil.copy2(self._before, self.tree / trial.slip.file)

    def end(self, pid: int) -> None:
        """Kill what runs in this copy, and all that it started."""
        for process in (pid, *marked_processes(str(self.tree), _MARK)):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


def run(slips: Sequence[Slip], jobs: int, directory: Path, root: Path = ROOT) -> Iterator[Trial]:
    """Try slips, ``jobs`` at a time; yield each at its end."""
    idle = [Copy(directory / str(number), root) for number in range(min(jobs, len(slips)))]
    busy: dict[int, tuple[Copy, Trial]] = {}
    waiting = list(reversed(slips))
    try:
        while waiting or busy:
            while idle and waiting:
                trial = Trial(waiting.pop())
                try:
                    text = trial.slip.applied(idle[-1].tree)
                    if not trial.slip.tests:
                        raise ValueError("no test is known that enters it: record them (--map)")
                except ValueError as error:
                    trial.outcome, trial.by = "not tried", str(error)
                    yield trial
                    continue
                copy = idle.pop()
                busy[copy.start(trial.slip, text)] = copy, trial
            for pid, (copy, trial) in list(busy.items()):
                trial.seconds = time.monotonic() - trial.began_seconds
                limit = _SLOW_TEST_SECONDS if trial.slip.slow else trial.slip.budget_seconds
                if trial.seconds > limit + _SPARE_SECONDS:
                    copy.end(pid)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    copy.judge(trial, os.waitstatus_to_exitcode(status))
                    idle.append(copy)
                    del busy[pid]
                    yield trial
            time.sleep(0.01)
    finally:
        for pid, (copy, _) in busy.items():
            copy.end(pid)
            os.waitpid(pid, 0)


def _chosen(arguments: argparse.Namespace) -> list[Slip]:
    if arguments.generate is not None:
        return generate(arguments.generate, arguments.seed, arguments.root)
    known = {slip.id: slip for slip in load(arguments.slips)}
    unknown = set(arguments.ids) - set(known)
    if unknown:
        raise ValueError(f"no slip has the id {', '.join(sorted(unknown))}")
    if arguments.ids:
        return [known[name] for name in arguments.ids]
    slips = [s for s in known.values() if not s.equivalent and (arguments.slow or not s.slow)]
    if arguments.draw is not None:
        slips = random.Random(arguments.seed).sample(slips, min(arguments.draw, len(slips)))
    return slips


def _status(trials: Sequence[Trial], share: float) -> int:
    """Return the exit status. ``share``: the part of slips to notice, within chance; 1: all."""
    outcomes = Counter(trial.outcome for trial in trials)
    tried = len(trials) - outcomes["not tried"]
    short = draw.falls_short(tried - outcomes["survived"], tried, share)
    return 2 if outcomes["not tried"] else 1 if short else 0


def _report(trials: Sequence[Trial], seconds: float) -> None:
    """Print what was not noticed."""
    for trial in trials:
        if trial.outcome == "survived" and trial.slip.budget_seconds:
            print(as_known(trial.slip))
        elif trial.outcome in ("survived", "not tried"):
            print(f"{trial.outcome}  {trial.slip.id}  {trial.slip.file}: {trial.slip.means}")
            for line in trial.by.splitlines() or trial.slip.tests:
                print(f"    {line}")
    counts = Counter(trial.outcome for trial in trials)
    summary = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    print(f"{len(trials)} slips in {seconds:.0f} s: {summary}")


def as_known(slip: Slip) -> str:
    """Return a slip as a file of tests/mutants has it, but for the tests that notice it."""
    return (
        f"[[slip]]\nid = \"{slip.id}\"\nfile = \"{slip.file}\"\nold = '''\n{slip.old}'''\n"
        f"new = '''\n{slip.new}'''\nmeans = {json.dumps(slip.means)}\ntests = []\n"
    )


@orderly_termination()
def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, hidden = parser.add_argument, {"type": Path, "metavar": "DIR", "help": argparse.SUPPRESS}
    add("ids", nargs="*", metavar="ID", help="only these, slow ones as well; of --map: tests")
    add("--draw", type=int, metavar="N", help="only so many, drawn at random")
    add("--generate", type=int, metavar="N", help="so many fresh ones instead")
    add("--map", action="store_true", help="record which test enters what")
    add("--seed", default="", metavar="S", help="of the draw (default: empty)")
    add("--slow", action="store_true", help="also those that only slow tests notice")
    add("--list", action="store_true", help="print the slips, and run none")
    add("--json", action="store_true", help="print what became of each as JSON")
    add("--jobs", type=int, default=3, metavar="N", help="at a time (default: 3)")
    add("--slips", default=SLIPS, **hidden)
    add("--root", default=ROOT, **hidden)
    arguments = parser.parse_args()
    generated = arguments.root / _GENERATED
    if arguments.map:
        coverage_map.update(generated / "coverage.json", arguments.ids)
        return 0
    try:
        slips = _chosen(arguments)
        share = 1.0
        if arguments.generate is not None:
            share = tomllib.loads((generated / "score.toml").read_text())["noticed"]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.list:
        print("\n".join(f"{slip.id}  {slip.file}: {slip.means}" for slip in slips))
        return 0
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _IMPORTED:
            importlib.import_module(name)
    trials = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        for trial in run(slips, arguments.jobs, Path(directory), arguments.root):
            trials.append(trial)
            if sys.stderr.isatty():
                bar = "#" * (40 * len(trials) // len(slips))
                print(f"\r[{bar:<40}] {len(trials)} of {len(slips)}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if arguments.json:
        print(json.dumps([asdict(trial) for trial in trials], indent=1))
    else:
        _report(trials, time.monotonic() - began)
    return _status(trials, share)


if __name__ == "__main__":
    sys.exit(main())
