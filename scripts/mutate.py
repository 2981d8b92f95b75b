#!/usr/bin/env python
"""Makes known slips in the package, one at a time, and names those that no test notices.

    .venv/bin/python scripts/mutate.py                     # all but the slow ones
    .venv/bin/python scripts/mutate.py --draw 30 --seed 7
    .venv/bin/python scripts/mutate.py restore7 left5

A slip is a few words of a file as they are, the same as they could have been by mistake or were
before a fault was mended, and the tests that have to notice (tests/mutants/*.toml). It is made in a
copy of this tree; its tests run there, in a fork of this process, which has imported pytest and
torch once. What tests start imports from the copy as well.

A slip is noticed when one of its tests fails; the first that does ends its run. A test that does
not end within its time counts as failed, and is shown as "by time": an assertion is better.

Exit status: 0 each slip was noticed; 1 at least one was not; 2 bad arguments, or a slip that could
not be tried: its text is not in its file exactly once, its tests are not there or were all skipped.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from common.ending import ending_in_order
from common.machine import marked_processes

ROOT = Path(__file__).parents[1]
SLIPS = ROOT / "tests" / "mutants"
_MARK = "DEADPOOL_MUTATE"
# One test, and one test of a slow slip; a run that exceeds this by so much hangs where no test can.
_TEST_SECONDS = 30
_SLOW_TEST_SECONDS = 240
_SPARE_SECONDS = 60
# What the forks have already: nothing of the package, which each of them imports from its copy, nor
# of Megatron, before which its stand-ins for a CPU have to be there.
_IMPORTED = ("pytest", "hypothesis.stateful", "torch.distributed.tensor", "wandb")
_FAILED_TESTS = 1  # pytest's exit status; 2 and above: it could not run them


@dataclass(frozen=True)
class Slip:
    """A slip. ``tests``: files or node ids; one that fails suffices. ``equivalent``: the reason why
    no test can tell it from the text as it is; such a one is not run."""

    id: str
    file: str
    old: str
    new: str
    means: str
    tests: tuple[str, ...] = ()
    slow: bool = False
    equivalent: str = ""

    def applied(self, root: Path = ROOT) -> str:
        """The file's text with the slip in it. Raises ValueError if it cannot be made."""
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.old) != 1:
            raise ValueError(f"its text is {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass
class Trial:
    """A slip on its way: how it ended, and the test that noticed it."""

    slip: Slip
    outcome: str = "survived"
    by: str = ""
    began_seconds: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


def load(directory: Path = SLIPS) -> list[Slip]:
    """All slips of a directory, in order. Raises ValueError for one that is wrong."""
    found: dict[str, Slip] = {}
    for path in sorted(directory.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["slip"]:
            try:
                slip = Slip(**{**entry, "tests": tuple(entry.get("tests", ()))})
            except TypeError as error:
                raise ValueError(f"{path.name}: {entry.get('id')}: {error}") from None
            if slip.id in found or bool(slip.tests) == bool(slip.equivalent):
                raise ValueError(f"{path.name}: {slip.id}: there twice, or without tests")
            found[slip.id] = slip
    return list(found.values())


def missing_tests(slip: Slip) -> list[str]:
    """Those of a slip's tests whose file does not have them, by their names."""

    def there(test: str) -> bool:
        file, *names = test.split("[")[0].split("::")
        path = ROOT / file
        text = path.read_text() if path.is_file() else ""
        return path.exists() and all(
            re.search(rf"^\s*(?:(?:async )?def |class ){n}\b", text, re.MULTILINE) for n in names
        )

    return [test for test in slip.tests if not there(test)]


class _NoShrinking:
    """The first example that hypothesis finds suffices. It tries many, the same in each run."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutate", deadline=None, max_examples=150, phases=phases, database=None
        )
        settings.load_profile("mutate")


class Copy:
    """A copy of the tree, in which one slip at a time is made and run."""

    def __init__(self, directory: Path) -> None:
        self.tree = directory / "tree"
        self._output = directory / "output"
        self._scratch = directory / "t"
        self._before = directory / "before"
        self._changes = 0
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        self.tree.mkdir(parents=True)
        for name in {Path(path).parts[0] for path in listed}:
            if (ROOT / name).is_dir():  # with the compiled modules, which are current
                shutil.copytree(ROOT / name, self.tree / name, symlinks=True)
            elif (ROOT / name).is_file():
                shutil.copy2(ROOT / name, self.tree / name)

    def start(self, slip: Slip, text: str) -> int:
        """Start a slip's tests; returns the process, which leads a session of its own."""
        path = self.tree / slip.file
        shutil.copy2(path, self._before)
        path.write_text(text)
        # Compiled modules are told apart by seconds and size: two slips in one second are not.
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
            own = str(ROOT / "scripts")
            sys.path[:] = [str(self.tree), *(p for p in sys.path if not p.startswith(own))]
            os.environ.update({"PYTHONPATH": str(self.tree), _MARK: str(self.tree)})
            import pytest

            limit = _SLOW_TEST_SECONDS if slip.slow else _TEST_SECONDS
            options = ["-x", "--no-header", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
            options += [f"--timeout={limit}", f"--basetemp={self._scratch}"]
            status = int(pytest.main([*options, *slip.tests], plugins=[_NoShrinking()]))
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
        elif status == _FAILED_TESTS:
            trial.by = "no test failed, but something was left over"
        elif status < 0:
            trial.outcome, trial.by = "by time", f"the whole run (signal {-status})"
        elif status or not re.search(r"\d passed", text):
            trial.outcome, trial.by = "not tried", text[-2000:]
        shutil.copy2(self._before, self.tree / trial.slip.file)

    def end(self, pid: int) -> None:
        """Kill what runs in this copy, and all that it started."""
        for one in (pid, *marked_processes(str(self.tree), _MARK)):
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue


def run(slips: Sequence[Slip], jobs: int, directory: Path) -> Iterator[Trial]:
    """Try slips, so many at a time; yields each when it is over."""
    idle = [Copy(directory / str(number)) for number in range(min(jobs, len(slips)))]
    busy: dict[int, tuple[Copy, Trial]] = {}
    waiting = list(reversed(slips))
    try:
        while waiting or busy:
            while idle and waiting:
                trial = Trial(waiting.pop())
                try:
                    text = trial.slip.applied(idle[-1].tree)
                except ValueError as error:
                    trial.outcome, trial.by = "not tried", str(error)
                    yield trial
                    continue
                copy = idle.pop()
                busy[copy.start(trial.slip, text)] = copy, trial
            for pid, (copy, trial) in list(busy.items()):
                trial.seconds = time.monotonic() - trial.began_seconds
                if trial.seconds > (_SLOW_TEST_SECONDS if trial.slip.slow else 0) + _SPARE_SECONDS:
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


def _status(trials: Sequence[Trial]) -> int:
    outcomes = {trial.outcome for trial in trials}
    return 2 if "not tried" in outcomes else 1 if "survived" in outcomes else 0


def _report(trials: Sequence[Trial], seconds: float) -> None:
    """Print what was not noticed."""
    for trial in trials:
        if trial.outcome in ("survived", "not tried"):
            print(f"{trial.outcome}  {trial.slip.id}  {trial.slip.file}: {trial.slip.means}")
            for line in trial.by.splitlines() or trial.slip.tests:
                print(f"    {line}")
    counts = Counter(trial.outcome for trial in trials)
    told = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    print(f"{len(trials)} slips in {seconds:.0f} s: {told}")


@ending_in_order()
def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="only these, slow ones as well")
    parser.add_argument("--draw", type=int, metavar="N", help="only so many, drawn at random")
    parser.add_argument("--seed", default="", metavar="S", help="of the draw (default: empty)")
    parser.add_argument(
        "--slow", action="store_true", help="also those that only slow tests notice"
    )
    parser.add_argument("--list", action="store_true", help="print the slips, and run none")
    parser.add_argument("--json", action="store_true", help="print what became of each as JSON")
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="at a time (default: 3)")
    parser.add_argument("--slips", type=Path, default=SLIPS, metavar="DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        slips = _chosen(arguments)
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
        for trial in run(slips, arguments.jobs, Path(directory)):
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
    return _status(trials)


if __name__ == "__main__":
    sys.exit(main())
