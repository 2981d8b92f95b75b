"""Compares the final states of all ranks of two runs, and every step's loss, gradient norm and
learning rate, exactly. It prints whether they are bit-identical, or where they first differ.
Iterations with different numbers of ranks are not compared: they are a difference themselves.

Exit status: 0 identical, 1 different, also in the number of ranks, 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.run_result import ResultError, RoleResult, RunResult, read_result
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunDirectoryError
from deadpool_megatron.observe.narration import count, printable

# Limits of printed differences, and of those in a Comparison: after the first difference, runs
# differ everywhere.
_MAX_PRINTED = 12
_MAX_KEPT = 1000
_UNSEEDED = "a program that never seeds 'random' and 'numpy' has other states of them in each run"
_GENERATORS = ("random state of numpy", "random state of python")
# Names of the differences that such a program may explain; see _state.
_UNSEEDED_STATES = {"state"} | {f"state ({x})" for x in (*_GENERATORS, ", ".join(_GENERATORS))}
_COUNT_NAMES = ("roles", "steps", "evaluations", "hashes")
_Runs = tuple[RunResult, RunResult]
_STEP_FIELDS = ("loss", "grad_norm", "learning_rate", "skipped", "samples")


@dataclass(frozen=True)
class Difference:
    """A difference of two runs. ``first`` and ``second``: the values of the runs as text;
    ``iteration``: None at the end; ``role``: None if it concerns all roles."""

    name: str
    iteration: int | None
    role: int | None
    first: str
    second: str

    def __str__(self) -> str:
        place = "at the end" if self.iteration is None else f"iteration {self.iteration}"
        if self.role is not None:
            place += f", role {self.role}"
        return f"{place}: {self.name}: {_readable(self.first)} and {_readable(self.second)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        values = dataclasses.asdict(self)
        return {"what": values.pop("name"), **values}


@dataclass(frozen=True)
class Comparison:
    """A comparison of two runs. ``differences``: the first differences in the order of training;
    empty if the runs are bit-identical. ``more``: the number of further differences.

    ``compared``: the numbers of roles at the end, steps, evaluations, and hashes of roles during
    training that were compared.
    """

    differences: tuple[Difference, ...]
    compared: Mapping[str, int]
    more: int = 0

    @property
    def identical(self) -> bool:
        """Return whether there are no differences, and something has been compared."""
        return not self.differences and min(self.compared["roles"], self.compared["steps"]) > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "bit_identical": self.identical,
            "compared": dict(self.compared),
            "differences": [entry.to_dict() for entry in self.differences],
            "more_differences": self.more,
        }


def compare_results(first: RunResult, second: RunResult) -> Comparison:
    """Compare two finished runs. Raises ResultError if a run has no steps or no final states, as
    two such runs must not count as identical.
    """
    runs = first, second
    for result in runs:
        if not result.roles or not result.story.steps:
            ending = f"exit status {result.exit_status}"
            if result.reason:
                ending += f", {result.reason}"
            raise ResultError(f"{result.directory} ended without results ({ending})")
    # A resumed run has no steps before its resume point.
    start = max(first.resumed_after, second.resumed_after)
    compared = Counter[str]()
    during = heapq.merge(
        _sizes(runs, start),
        _steps(runs, start, compared),
        _evaluations(runs, start, compared),
        _hashes(runs, compared),
        key=lambda entry: (entry.iteration or 0, -1 if entry.role is None else entry.role),
    )
    differences = itertools.chain(during, _ends(runs, compared))
    kept = tuple(itertools.islice(differences, _MAX_KEPT))
    more = sum(1 for _ in differences)
    return Comparison(kept, {name: compared[name] for name in _COUNT_NAMES}, more)


def _sizes(runs: _Runs, start: int) -> Iterator[Difference]:
    """Yield a difference for each span of iterations in which the numbers of ranks differ."""
    last = max(run.iterations for run in runs)
    changes = {k for run in runs for k in run.story.sizes if start < k <= last}
    for begin, end in itertools.pairwise(sorted({start + 1, *changes, last + 1})):
        sizes = [f"{run.ranks_at(begin)} ranks" for run in runs]
        yield from _unequal(f"sizes to iteration {end - 1}, not compared", begin, None, *sizes)


def _are_alike(runs: _Runs, iteration: int) -> bool:
    """Return whether both runs computed an iteration with the same number of ranks."""
    return runs[0].ranks_at(iteration) == runs[1].ranks_at(iteration)


def _steps(runs: _Runs, start: int, compared: Counter[str]) -> Iterator[Difference]:
    """Yield the differences of steps in order. Only two steps at a time are in memory, as a run
    may have millions."""
    sides = [run.story.steps for run in runs]
    in_order = heapq.merge(*(side.after(start) for side in sides), key=attrgetter("iteration"))
    for iteration, group in itertools.groupby(in_order, attrgetter("iteration")):
        if not _are_alike(runs, iteration):
            continue
        compared["steps"] += 1
        step, *others = group
        if not others:  # the other run lacks this step
            has_first = next(sides[0].after(iteration - 1), None) == step
            yield from _unequal("step", iteration, None, *_presence(has_first, not has_first))
            continue
        for name in _STEP_FIELDS if step != others[0] else ():
            values = getattr(step, name), getattr(others[0], name)
            yield from _unequal(name.replace("_", " "), iteration, None, *values)


def _evaluations(runs: _Runs, start: int, compared: Counter[str]) -> Iterator[Difference]:
    sides = [run.story.evaluations for run in runs]
    for iteration in sorted(sides[0].keys() | sides[1].keys()):
        if iteration > start and _are_alike(runs, iteration):
            compared["evaluations"] += 1
            values = [losses.get(iteration, "missing") for losses in sides]
            yield from _unequal("evaluation loss", iteration, None, *values)


def _hashes(runs: _Runs, compared: Counter[str]) -> Iterator[Difference]:
    """Yield the differences between state hashes at iterations for which both runs have them."""
    sides = [run.story.hashes or {} for run in runs]
    for iteration in sorted(k for k in sides[0].keys() & sides[1].keys() if _are_alike(runs, k)):
        left, right = (hashes[iteration] for hashes in sides)
        for role in sorted(left.keys() & right.keys()):
            compared["hashes"] += 1
            yield from _unequal("state", iteration, role, left[role], right[role])


def _ends(runs: _Runs, compared: Counter[str]) -> Iterator[Difference]:
    for name in ("world_size", "iterations", "exit_status"):
        yield from _unequal(name.replace("_", " "), None, None, *(getattr(r, name) for r in runs))
    sizes = [run.ranks_at(run.iterations) for run in runs]
    yield from _unequal("ranks", None, None, *sizes)
    first, second = (run.roles for run in runs)
    for role in sorted(first.keys() | second.keys()) if len({*sizes}) == 1 else ():
        compared["roles"] += 1
        left, right = first.get(role), second.get(role)
        yield from _unequal("role", None, role, *_presence(left is not None, right is not None))
        if left is not None and right is not None:
            yield from _unequal(_state(left, right), None, role, left.sha256, right.sha256)
            yield from _unequal("samples", None, role, left.samples, right.samples)


def _state(first: RoleResult, second: RoleResult) -> str:
    """Return the name of a difference of states, with the differing parts if both roles have
    entries. Weights and optimizer state have no entry, so they differ if all entries agree."""
    if not (first.entries and second.entries):
        return "state"
    names = sorted(name for name, _ in first.entries.items() ^ second.entries.items())
    texts = [name.replace("rng.", "random state of ") for name in dict.fromkeys(names)]
    return f"state ({', '.join(texts) or 'weights or optimizer state'})"


def _unequal(
    name: str, iteration: int | None, role: int | None, first: object, second: object
) -> Iterator[Difference]:
    if first != second:
        yield Difference(name, iteration, role, str(first), str(second))


def _presence(*are_present: bool) -> list[str]:
    return ["present" if is_present else "missing" for is_present in are_present]


def _readable(text: str) -> str:
    """Return the text of a value, with a hash shortened and the decimal value of a hexadecimal
    float added."""
    if len(text) == 64 and all(c in "0123456789abcdef" for c in text):
        return text[:12]
    if text.startswith(("0x", "-0x")):
        with contextlib.suppress(ValueError, OverflowError):
            return f"{text} ({float.fromhex(text):.9g})"
    return text


def command_note(first: Path, second: Path) -> str:
    """Return lines with the commands of the runs; empty if the commands are equal or unknown.
    Different commands explain different results."""
    try:
        infos = [RunDirectory(path).read_run(only_to_show=True) for path in (first, second)]
    except RunDirectoryError:
        return ""
    commands = [" ".join(info.command) for info in infos]
    return "" if len({*commands}) == 1 else "\n  ".join(["the commands differ:", *commands])


def describe(comparison: Comparison) -> list[str]:
    """Return lines with the verdict, its basis, and the differences in order."""
    counts = comparison.compared
    extent = f"{count(counts['roles'], 'final state')} and {count(counts['steps'], 'iteration')}"
    if counts["evaluations"]:
        extent += f", {count(counts['evaluations'], 'evaluation')}"
    if counts["hashes"]:
        extent += f", {count(counts['hashes'], 'state')} on the way"
    lines = [f"bit-identical: {'yes' if comparison.identical else 'no'}   (compared: {extent})"]
    for number, entry in enumerate(comparison.differences[:_MAX_PRINTED]):
        lines.append(f"  then {entry}" if number else f"first difference: {entry}")
    if more := max(0, len(comparison.differences) - _MAX_PRINTED) + comparison.more:
        lines.append(f"  and {more} more")
    if _UNSEEDED_STATES.issuperset(entry.name for entry in comparison.differences):
        lines += [f"  all else is equal: {_UNSEEDED}"] if comparison.differences else []
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("first", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("second", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool compare``. Raises ResultError."""
    comparison = compare_results(read_result(args.first), read_result(args.second))
    if args.json:
        print(json.dumps(comparison.to_dict(), indent=1))
    else:
        print(printable("\n".join(describe(comparison))))
        if not comparison.identical and (note := command_note(args.first, args.second)):
            print(printable(note))
    return 0 if comparison.identical else 1
