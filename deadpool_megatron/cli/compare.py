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
from deadpool_megatron.observe.narration import count, shown
from deadpool_megatron.observe.story import Story

# How many differences are listed; a run that went astray differs everywhere afterwards.
_SHOWN = 12
_LISTED = 1000
_UNSEEDED = "a program that never seeds 'random' and 'numpy' has other states of them in each run"
_GENERATORS = ("random state of numpy", "random state of python")
_UNSEEDED_STATES = {"state"} | {f"state ({x})" for x in (*_GENERATORS, ", ".join(_GENERATORS))}
_COMPARED = ("roles", "steps", "evaluations", "hashes")
_STEP_FIELDS = ("loss", "grad_norm", "learning_rate", "skipped", "samples")


@dataclass(frozen=True)
class Difference:
    """One fact in which the runs differ; ``iteration`` None: a fact about the end."""

    what: str
    iteration: int | None
    role: int | None
    first: str
    second: str

    def __str__(self) -> str:
        place = "at the end" if self.iteration is None else f"iteration {self.iteration}"
        if self.role is not None:
            place += f", role {self.role}"
        return f"{place}: {self.what}: {_shown(self.first)} and {_shown(self.second)}"


@dataclass(frozen=True)
class Comparison:
    """Everything compared. ``differences`` in the order of training, the first ones of them;
    empty means bit-identical. ``more``: so many are not listed.

    ``compared`` counts what was compared: role hashes at the end, steps, evaluations, and hashes
    of roles at iterations where both runs took them.
    """

    differences: tuple[Difference, ...]
    compared: Mapping[str, int]
    more: int = 0

    @property
    def identical(self) -> bool:
        """Return whether no compared fact differs."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "bit_identical": self.identical,
            "compared": dict(self.compared),
            "differences": [dataclasses.asdict(entry) for entry in self.differences],
            "more_differences": self.more,
        }


def compare_results(first: RunResult, second: RunResult) -> Comparison:
    """Compare two finished runs fact by fact. Raises ResultError when one has nothing to compare.

    Two runs that hold no steps or no state hashes are not called identical: that is an error.
    """
    for result in (first, second):
        if not result.roles or not result.story.steps:
            ending = f"exit status {result.exit_status}"
            if result.reason:
                ending += f", {result.reason}"
            raise ResultError(f"{result.directory} ended without results ({ending})")
    # A resumed run holds only what it trained itself.
    start = max(first.resumed_after, second.resumed_after)
    compared = Counter({"roles": len(first.roles.keys() | second.roles.keys())})
    on_the_way = heapq.merge(
        _steps(first.story, second.story, start, compared),
        _evaluations(first.story, second.story, start, compared),
        _hashes(first.story, second.story, compared),
        key=lambda entry: (entry.iteration or 0, -1 if entry.role is None else entry.role),
    )
    found = itertools.chain(on_the_way, _ends(first, second))
    listed = tuple(itertools.islice(found, _LISTED))
    more = sum(1 for _ in found)
    return Comparison(listed, {name: compared[name] for name in _COMPARED}, more)


def _steps(first: Story, second: Story, start: int, compared: Counter[str]) -> Iterator[Difference]:
    """In order; a run holds up to millions of steps, of which two are looked at at a time."""
    sides = first.steps.after(start), second.steps.after(start)
    in_order = heapq.merge(*sides, key=attrgetter("iteration"))
    for iteration, group in itertools.groupby(in_order, attrgetter("iteration")):
        compared["steps"] += 1
        one, *others = group
        if not others:
            has_first = next(first.steps.after(iteration - 1), None) == one
            yield from _unequal("step", iteration, None, *_presence(has_first, not has_first))
            continue
        for name in _STEP_FIELDS if one != others[0] else ():
            values = getattr(one, name), getattr(others[0], name)
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
    """Hashes taken on the way; what only one run took (another interval) is no difference."""
    all_ours, all_theirs = first.hashes or {}, second.hashes or {}
    for iteration in sorted(all_ours.keys() & all_theirs.keys()):
        ours, theirs = all_ours[iteration], all_theirs[iteration]
        for role in sorted(ours.keys() & theirs.keys()):
            compared["hashes"] += 1
            yield from _unequal("state", iteration, role, ours[role], theirs[role])


def _ends(first: RunResult, second: RunResult) -> Iterator[Difference]:
    for name in ("world_size", "iterations", "exit_status"):
        values = getattr(first, name), getattr(second, name)
        yield from _unequal(name.replace("_", " "), None, None, *values)
    for role in sorted(first.roles.keys() | second.roles.keys()):
        one, other = first.roles.get(role), second.roles.get(role)
        yield from _unequal("role", None, role, *_presence(one is not None, other is not None))
        if one is not None and other is not None:
            yield from _unequal(_state(one, other), None, role, one.sha256, other.sha256)
            yield from _unequal("samples", None, role, one.samples, other.samples)


def _state(first: RoleResult, second: RoleResult) -> str:
    """Return what differs in two states, by the names of their entries, if they have any."""
    if not (first.entries and second.entries):
        return "state"
    names = sorted(name for name, _ in first.entries.items() ^ second.entries.items())
    words = [name.replace("rng.", "random state of ") for name in dict.fromkeys(names)]
    return f"state ({', '.join(words) or 'weights or optimizer state'})"


def _unequal(
    what: str, iteration: int | None, role: int | None, first: object, second: object
) -> Iterator[Difference]:
    if first != second:
        yield Difference(what, iteration, role, str(first), str(second))


def _presence(*are_there: bool) -> list[str]:
    return ["present" if there else "missing" for there in are_there]


def _shown(text: str) -> str:
    """A fact for people: hexadecimal floats with their value, hashes cut to their start."""
    if len(text) == 64 and all(c in "0123456789abcdef" for c in text):
        return text[:12]
    if text.startswith(("0x", "-0x")):
        with contextlib.suppress(ValueError, OverflowError):
            return f"{text} ({float.fromhex(text):.9g})"
    return text


def command_note(first: Path, second: Path) -> str:
    """A line when the runs were started with different commands: that explains differences."""
    try:
        infos = [RunDirectory(path).read_run(only_to_show=True) for path in (first, second)]
    except RunDirectoryError:
        return ""
    one, other = (" ".join(info.command) for info in infos)
    return "" if one == other else f"the commands differ:\n  {one}\n  {other}"


def describe(comparison: Comparison) -> list[str]:
    """Lines for people: the verdict, what it rests on, and the differences, first one first."""
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
    if _UNSEEDED_STATES.issuperset(entry.what for entry in comparison.differences):
        lines += [f"  all else is equal: {_UNSEEDED}"] if comparison.differences else []
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("first", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("second", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool compare``. Raises ResultError."""
    comparison = compare_results(read_result(args.first), read_result(args.second))
    if args.json:
        print(json.dumps(comparison.to_dict(), indent=1))
    else:
        print(shown("\n".join(describe(comparison))))
        if not comparison.identical and (note := command_note(args.first, args.second)):
            print(shown(note))
    return 0 if comparison.identical else 1
