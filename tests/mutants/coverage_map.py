"""The tests that enter each function of the core: recorded, chosen, and read.

A function's tests stand in the order in which they are tried: first those that are quick and enter
few functions besides. They are as many as fit into the seconds of one slip. The map is JSON, with
one line for each file and each list of tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "deadpool_megatron"
CORE = ("layout", "vault", "member", "megatron", "cluster", "comms", "persist")
# At most, of one function; the seconds are those of the recording.
FUNCTION_TESTS = 120
_FUNCTION_SECONDS = 60.0
_TEST_SECONDS = 40.0
# Cases of a parametrized test stand alone in the map if together they take longer.
_CASES_SECONDS = 5.0
# The cost of a test apart from its own run, and the minimum number of functions that it enters.
_EXTRA_SECONDS = 0.05
_EXTRA_FUNCTIONS = 5
# Neither runs against a checkout of Megatron-LM, nor what only --all runs, nor tests of scripts.
_SELECTION = (
    *("-m", "not matrix and not megatron_lm and not exhaustive", "--full", "--timeout=60"),
    *("--ignore=tests/scripts", "--ignore=tests/reach", "--ignore=tests/faults"),
)


@dataclass
class Recorded:
    """A test, how long it took, and the functions that it entered."""

    seconds: float = 0.0
    functions: set[str] = field(default_factory=set)

    def cost(self) -> float:
        """Return how late the test is tried."""
        return (self.seconds + _EXTRA_SECONDS) * (len(self.functions) + _EXTRA_FUNCTIONS)


def chosen(recorded: Mapping[str, Recorded]) -> dict[str, list[str]]:
    """Return the tests of each function, in the order in which they are to be tried."""
    seconds: Counter[str] = Counter()
    for name, test in recorded.items():
        seconds[name.split("[")[0]] += test.seconds
    tests: dict[str, Recorded] = defaultdict(Recorded)
    for name, test in recorded.items():
        whole = name.split("[")[0]
        entry = tests[whole if seconds[whole] <= _CASES_SECONDS else name]
        entry.seconds += test.seconds
        entry.functions |= test.functions
    found: dict[str, list[str]] = defaultdict(list)
    spent: Counter[str] = Counter()
    for name in sorted(tests, key=lambda name: (tests[name].cost(), name)):
        if tests[name].seconds > _TEST_SECONDS:
            continue
        for function in tests[name].functions:
            total = spent[function] + tests[name].seconds
            if total <= _FUNCTION_SECONDS and len(found[function]) < FUNCTION_TESTS:
                found[function].append(name)
                spent[function] = total
    return {name: found[name] for name in sorted(found) if name.split("/")[0] in CORE}


def joined(
    before: Mapping[str, list[str]], newer: Mapping[str, list[str]], again: Sequence[str]
) -> dict[str, list[str]]:
    """Return a map in which those of the tests ``again`` are as recorded now, before the others."""
    return {
        name: [
            *newer.get(name, ()),
            *(test for test in before.get(name, ()) if not test.startswith(tuple(again))),
        ]
        for name in sorted({*before, *newer})
    }


def read(path: Path) -> dict[str, list[str]]:
    """Return the tests of each function."""
    found = json.loads(path.read_text())
    tests = [f"{file}::{name}" for file, names in found["tests"].items() for name in names]
    return {
        f"{file}:{name}": [tests[number] for number in found["lists"][index]]
        for file, functions in found["functions"].items()
        for name, index in functions.items()
    }


def write(functions: Mapping[str, list[str]], path: Path) -> None:
    """Write the map, sorted, so that two of them can be compared by lines."""
    tests = sorted({tuple(test.split("::", 1)) for names in functions.values() for test in names})
    numbers = {"::".join(test): number for number, test in enumerate(tests)}
    found: dict[str, Any] = {"tests": defaultdict(list), "lists": [], "functions": {}}
    for file, name in tests:
        found["tests"][file].append(name)
    lists: dict[tuple[int, ...], int] = {}
    for function, names in functions.items():
        file, _, name = function.partition(":")
        index = lists.setdefault(tuple(numbers[test] for test in names), len(lists))
        found["functions"].setdefault(file, {})[name] = index
    found["lists"] = list(lists)
    text = json.dumps(found, separators=(",", ":"))
    path.write_text(re.sub(r"(?<=[]}]),", ",\n", text) + "\n")


def record(selection: Sequence[str] = _SELECTION) -> dict[str, Recorded]:
    """Run the tests with the recorder in each of their processes; returns those that passed."""
    tests: dict[str, Recorded] = {}
    with tempfile.TemporaryDirectory(prefix="mutate-map-") as folder:
        (Path(folder) / "current").write_bytes(b"0" * 8)
        environment = os.environ | {
            "DEADPOOL_MAP": folder,
            "DEADPOOL_MAP_PACKAGE": str(ROOT / PACKAGE),
            "PYTHONPATH": str(ROOT / "tests" / "common" / "entered"),
        }
        command = [sys.executable, "-m", "pytest", "-p", "sitecustomize", *selection]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        numbers: dict[str, Recorded] = defaultdict(Recorded)
        for line in (Path(folder) / "passed").read_text().splitlines():
            number, seconds, name = line.split(" ", 2)
            tests[name] = numbers[number]
            tests[name].seconds = float(seconds)
        for path in Path(folder).glob("*.records"):
            for line in path.read_text().splitlines():
                number, _, function = line.partition(" ")
                numbers[number].functions.add(function)
    return tests


def update(path: Path, again: Sequence[str] = ()) -> None:
    """Record tests in the map again: those that are named, or all."""
    if again:
        found = chosen(record(("--full", "--timeout=600", *again)))
        write(joined(read(path), found, again), path)
    else:
        write(chosen(record()), path)
