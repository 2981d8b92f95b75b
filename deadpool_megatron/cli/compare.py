"""``deadpool compare DIR DIR``: did two runs end bit-identical, and where do they first differ."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.results import ResultError, RunResult, Step, read_result
from deadpool_megatron.cli.tables import count
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunDirectoryError

# How many differences are listed; a run that went astray differs everywhere afterwards.
_SHOWN = 12
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
    """Everything compared. ``differences`` in the order of training; empty means bit-identical.

    ``compared`` counts what was compared: role hashes at the end, steps, evaluations, and hashes
    of roles at iterations where both runs took them.
    """

    differences: tuple[Difference, ...]
    compared: Mapping[str, int]

    @property
    def identical(self) -> bool:
        """Whether no compared fact differs."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "bit_identical": self.identical,
            "compared": dict(self.compared),
            "differences": [dataclasses.asdict(entry) for entry in self.differences],
        }


def compare_results(first: RunResult, second: RunResult) -> Comparison:
    """Compare two finished runs fact by fact. Raises ResultError when one has nothing to compare.

    Two runs that hold no steps or no state hashes are not called identical: that is an error.
    """
    for result in (first, second):
        if not result.roles or not result.steps:
            ending = f"exit status {result.exit_status}"
            if result.reason:
                ending += f", {result.reason}"
            raise ResultError(f"{result.directory} ended without results ({ending})")
    # A resumed run holds only what it trained itself.
    start = max(first.resumed_after, second.resumed_after)
    first, second = _from(first, start), _from(second, start)
    differences = sorted(
        [*_steps(first, second), *_evaluations(first, second), *_hashes(first, second)],
        key=lambda entry: (entry.iteration or 0, entry.role if entry.role is not None else -1),
    )
    differences += _ends(first, second)
    both = first.hashes.keys() & second.hashes.keys()
    return Comparison(
        differences=tuple(differences),
        compared={
            "roles": len(first.roles.keys() | second.roles.keys()),
            "steps": len({s.iteration for s in (*first.steps, *second.steps)}),
            "evaluations": len(first.evaluations.keys() | second.evaluations.keys()),
            "hashes": sum(len(first.hashes[i].keys() & second.hashes[i].keys()) for i in both),
        },
    )


def _from(result: RunResult, start: int) -> RunResult:
    """The result without the steps and evaluations up to iteration ``start``."""
    return dataclasses.replace(
        result,
        steps=tuple(step for step in result.steps if step.iteration > start),
        evaluations={k: loss for k, loss in result.evaluations.items() if k > start},
    )


def _steps(first: RunResult, second: RunResult) -> Iterator[Difference]:
    ours, theirs = ({s.iteration: s for s in result.steps} for result in (first, second))
    for iteration in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(iteration), theirs.get(iteration)
        if one is None or other is None:
            yield Difference("step", iteration, None, _presence(one), _presence(other))
            continue
        for name in _STEP_FIELDS:
            values = getattr(one, name), getattr(other, name)
            if values[0] != values[1]:
                yield Difference(
                    name.replace("_", " "), iteration, None, str(values[0]), str(values[1])
                )


def _evaluations(first: RunResult, second: RunResult) -> Iterator[Difference]:
    for iteration in first.evaluations.keys() | second.evaluations.keys():
        values = [result.evaluations.get(iteration, "missing") for result in (first, second)]
        if values[0] != values[1]:
            yield Difference("evaluation loss", iteration, None, *values)


def _hashes(first: RunResult, second: RunResult) -> Iterator[Difference]:
    """Hashes taken on the way; what only one run took (another interval) is no difference."""
    for iteration in first.hashes.keys() & second.hashes.keys():
        ours, theirs = first.hashes[iteration], second.hashes[iteration]
        for role in ours.keys() & theirs.keys():
            if ours[role] != theirs[role]:
                yield Difference("state", iteration, role, ours[role], theirs[role])


def _ends(first: RunResult, second: RunResult) -> Iterator[Difference]:
    for name in ("world_size", "iterations", "exit_status"):
        values = getattr(first, name), getattr(second, name)
        if values[0] != values[1]:
            yield Difference(name.replace("_", " "), None, None, str(values[0]), str(values[1]))
    for role in sorted(first.roles.keys() | second.roles.keys()):
        one, other = first.roles.get(role), second.roles.get(role)
        if one is None or other is None:
            yield Difference("role", None, role, _presence(one), _presence(other))
            continue
        if one.sha256 != other.sha256:
            yield Difference("state", None, role, one.sha256, other.sha256)
        if one.samples != other.samples:
            yield Difference("samples", None, role, str(one.samples), str(other.samples))


def _presence(value: Step | object | None) -> str:
    return "missing" if value is None else "present"


def _shown(text: str) -> str:
    """A fact for people: hexadecimal floats with their value, hashes cut to their start."""
    if len(text) == 64 and all(c in "0123456789abcdef" for c in text):
        return text[:12]
    if text.startswith(("0x", "-0x")):
        return f"{text} ({float.fromhex(text):.9g})"
    return text


def command_note(first: Path, second: Path) -> str | None:
    """A line when the runs were started with different commands: that explains differences."""
    try:
        infos = [RunDirectory(path).read_run(only_to_show=True) for path in (first, second)]
    except RunDirectoryError:
        return None
    commands = [" ".join(info.command) for info in infos]
    if commands[0] == commands[1]:
        return None
    return f"the commands differ:\n  {commands[0]}\n  {commands[1]}"


def describe(comparison: Comparison) -> list[str]:
    """Lines for people: the verdict, what it rests on, and the differences, first one first."""
    counts = comparison.compared
    extent = f"{count(counts['roles'], 'final state')} and {count(counts['steps'], 'step')}"
    if counts["evaluations"]:
        extent += f", {count(counts['evaluations'], 'evaluation')}"
    if counts["hashes"]:
        extent += f", {count(counts['hashes'], 'state')} on the way"
    lines = [f"bit-identical: {'yes' if comparison.identical else 'no'}   (compared: {extent})"]
    if comparison.identical:
        return lines
    lines.append(f"first difference: {comparison.differences[0]}")
    rest = comparison.differences[1:]
    lines += [f"  then {entry}" for entry in rest[: _SHOWN - 1]]
    if len(rest) > _SHOWN - 1:
        lines.append(f"  and {len(rest) - _SHOWN + 1} more")
    return lines


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``compare`` to the commands."""
    parser = subparsers.add_parser(
        "compare",
        help="say whether two runs ended bit-identical, and where they first differ",
        description=(
            "Compares the final states of all roles, and every step's loss, gradient norm and"
            " learning rate, exactly. Exit status: 0 identical, 1 different, 2 bad input."
        ),
    )
    parser.add_argument("first", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("second", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool compare``."""
    try:
        comparison = compare_results(read_result(args.first), read_result(args.second))
    except ResultError as error:
        print(f"deadpool compare: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(comparison.to_dict(), indent=1))
    else:
        print("\n".join(describe(comparison)))
        note = None if comparison.identical else command_note(args.first, args.second)
        if note is not None:
            print(note)
    return 0 if comparison.identical else 1
