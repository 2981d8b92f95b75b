"""Compares the final states of all roles of two runs, and every step's loss, gradient norm and
learning rate, exactly. It prints whether they are bit-identical, or where they first differ.

Exit status: 0 identical, 1 different, 2 bad input.
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
from deadpool_megatron.observe.story import Story

# Limits of listed differences: after the first, a run differs everywhere.
_SHOWN = 12
_LISTED = 1000
_UNSEEDED = "a program that never seeds 'random' and 'numpy' has other states of them in each run"
_GENERATORS = ("random state of numpy", "random state of python")
_UNSEEDED_STATES = {"state"} | {f"state ({x})" for x in (*_GENERATORS, ", ".join(_GENERATORS))}
_COMPARED = ("roles", "steps", "evaluations", "hashes")
_STEP_FIELDS = ("loss", "grad_norm", "learning_rate", "skipped", "samples")


@dataclass(frozen=True)
class Difference:
    """A difference of the runs; ``iteration`` None: at the end."""

    name: str
    iteration: int | None
    role: int | None
    first: str
    second: str

    def __str__(self) -> str:
        place = "at the end" if self.iteration is None else f"iteration {self.iteration}"
        if self.role is not None:
            place += f", role {self.role}"
        return f"{place}: {self.name}: {_shown(self.first)} and {_shown(self.second)}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        values = dataclasses.asdict(self)
        return {"what": values.pop("name"), **values}


@dataclass(frozen=True)
class Comparison:
    """A comparison. ``differences``: those listed, in the order of training; none if the runs are
    bit-identical. ``more``: the number of differences that are not listed.

    ``compared``: counts of role hashes at the end, steps, evaluations, and role hashes at
    iterations at which both runs have them.
    """

    differences: tuple[Difference, ...]
    compared: Mapping[str, int]
    more: int = 0

    @property
    def identical(self) -> bool:
        """Return whether there are no differences."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "bit_identical": self.identical,
            "compared": dict(self.compared),
            "differences": [entry.to_dict() for entry in self.differences],
            "more_differences": self.more,
        }


def compare_results(first: RunResult, second: RunResult) -> Comparison:
    """Compare two finished runs. Raises ResultError if a run has no steps or no state hashes, as
    such runs must not count as identical.
    """
    for result in (first, second):
        if not result.roles or not result.story.steps:
            ending = f"exit status {result.exit_status}"
            if result.reason:
                ending += f", {result.reason}"
            raise ResultError(f"{result.directory} ended without results ({ending})")
    # A resumed run has only its own steps.
    start = max(first.resumed_after, second.resumed_after)
    compared = Counter({"roles": len(first.roles.keys() | second.roles.keys())})
    during = heapq.merge(
        _steps(first.story, second.story, start, compared),
        _evaluations(first.story, second.story, start, compared),
        _hashes(first.story, second.story, compared),
        key=lambda entry: (entry.iteration or 0, -1 if entry.role is None else entry.role),
    )
    found = itertools.chain(during, _ends(first, second))
    listed = tuple(itertools.islice(found, _LISTED))
    more = sum(1 for _ in found)
    return Comparison(listed, {name: compared[name] for name in _COMPARED}, more)


def _steps(first: Story, second: Story, start: int, compared: Counter[str]) -> Iterator[Difference]:
    """Yield the differences of steps in order, with two of millions of steps in memory."""
    sides = first.steps.after(start), second.steps.after(start)
    in_order = heapq.merge(*sides, key=attrgetter("iteration"))
    for iteration, group in itertools.groupby(in_order, attrgetter("iteration")):
        compared["steps"] += 1
        step, *others = group
        if not others:
            has_first = next(first.steps.after(iteration - 1), None) == step
            yield from _unequal("step", iteration, None, *_presence(has_first, not has_first))
            continue
        for name in _STEP_FIELDS if step != others[0] else ():
            values = getattr(step, name), getattr(others[0], name)
            yield from _unequal(name.replace("_", " "), iteration, None, *values)


def _evaluations(
    first: Story, second: Story, start: int, compared: Counter[str]
) -> Iterator[Difference]:
    for iteration in sorted(first.evaluations.keys() | second.evaluations.keys()):
        if iteration > start:
            compared["evaluations"] += 1
            values = [run.evaluations.get(iteration, "missing") for run in (first, second)]
            yield from _unequal("evaluation loss", iteration, None, *values)


def _hashes(first: Story, second: Story, compared: Counter[str]) -> Iterator[Difference]:
    """Yield the differences of hashes during the runs, at iterations at which both have them."""
    sides = first.hashes or {}, second.hashes or {}
    for iteration in sorted(sides[0].keys() & sides[1].keys()):
        left, right = (hashes[iteration] for hashes in sides)
        for role in sorted(left.keys() & right.keys()):
            compared["hashes"] += 1
            yield from _unequal("state", iteration, role, left[role], right[role])


def _ends(first: RunResult, second: RunResult) -> Iterator[Difference]:
    for name in ("world_size", "iterations", "exit_status"):
        values = getattr(first, name), getattr(second, name)
        yield from _unequal(name.replace("_", " "), None, None, *values)
    for role in sorted(first.roles.keys() | second.roles.keys()):
        left, right = first.roles.get(role), second.roles.get(role)
        yield from _unequal("role", None, role, *_presence(left is not None, right is not None))
        if left is not None and right is not None:
            yield from _unequal(_state(left, right), None, role, left.sha256, right.sha256)
            yield from _unequal("samples", None, role, left.samples, right.samples)


def _state(first: RoleResult, second: RoleResult) -> str:
    """Return the name of a difference of states, by their differing entries if they have any."""
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


def _shown(text: str) -> str:
    """Format a value: hexadecimal floats with their value, hashes shortened."""
    if len(text) == 64 and all(c in "0123456789abcdef" for c in text):
        return text[:12]
    if text.startswith(("0x", "-0x")):
        with contextlib.suppress(ValueError, OverflowError):
            return f"{text} ({float.fromhex(text):.9g})"
    return text


def command_note(first: Path, second: Path) -> str:
    """Return lines with the commands of the runs if they differ, which explains differences."""
    try:
        infos = [RunDirectory(path).read_run(only_to_show=True) for path in (first, second)]
    except RunDirectoryError:
        return ""
    commands = [" ".join(info.command) for info in infos]
    return "" if len({*commands}) == 1 else "\n  ".join(["the commands differ:", *commands])


def describe(comparison: Comparison) -> list[str]:
    """Return lines with the verdict, its basis, and the differences in order."""
    counts = comparison.compared
    extent = f"{count(counts['roles'], 'final state')} and {count(counts['steps'], 'step')}"
    if counts["evaluations"]:
        extent += f", {count(counts['evaluations'], 'evaluation')}"
    if counts["hashes"]:
        extent += f", {count(counts['hashes'], 'state')} on the way"
    lines = [f"bit-identical: {'yes' if comparison.identical else 'no'}   (compared: {extent})"]
    for number, entry in enumerate(comparison.differences[:_SHOWN]):
        lines.append(f"  then {entry}" if number else f"first difference: {entry}")
    if more := max(0, len(comparison.differences) - _SHOWN) + comparison.more:
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
