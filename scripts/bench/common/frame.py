"""The frame of all cases: flags, sides in turns, rows, JSON and plot.

A case is a module: its text teaches (the first line is its question); MINUTES is its
duration; ROUNDS and STEPS, if it has them, are defaults; QUICK is the command line of a trial;
``add_flags(parser)`` is optional; ``measure(args, base)`` returns the facts, with ``rows``, and
``wrong``, reasons for exit status 1, if there are any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from common import figures
from common.machine import machine_facts, write_facts
from common.termination import orderly_termination

Facts = dict[str, Any]
T = TypeVar("T")


class BenchError(Exception):
    """A run failed; the message names it and shows the end of its output."""


class UsageError(Exception):
    """The case cannot be run like this, or not here; the message is one line."""


def at_least(minimum: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return the type of a flag with this minimum."""

    def number(text: str) -> float:
        value = kind(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum:g}")
        return value

    return number


def parser_of(case: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of a case, with the flags that all share."""
    parser = argparse.ArgumentParser(
        prog=f"bench.py {case.__name__.removeprefix('cases.')}",
        description=case.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, minimum, text in (("rounds", 1, "turns"), ("steps", 2, "measured per run")):
        if default := getattr(case, name.upper(), 0):
            kind = {"type": at_least(minimum), "default": default, "metavar": "N"}
            parser.add_argument(f"--{name}", help=text, **kind)
    if hasattr(case, "add_flags"):
        case.add_flags(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON (default: standard output)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="the rows, drawn")
    parser.add_argument("--quick", action="store_true", help=f"as: {' '.join(case.QUICK)}")
    return parser


@orderly_termination()
def run(case: ModuleType, argv: Sequence[str]) -> int:
    """Measure in a temporary folder, print the rows and write the facts; return the exit status."""
    parser = parser_of(case)
    args = parser.parse_args(argv)
    if args.quick:
        args = parser.parse_args([*case.QUICK, *argv])
    facts: Facts = {"bench": parser.prog.split()[1], "quick": args.quick}
    facts["machine"] = machine_facts()
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as base:
        try:
            facts |= case.measure(args, Path(base))
        except UsageError as error:
            parser.error(str(error))
        except BenchError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 1
    print(figures.table(facts["rows"]), file=sys.stderr)
    for reason in facts.get("wrong", ()):
        print(f"{parser.prog}: {reason}", file=sys.stderr)
    write_facts(args.out, facts)
    if args.plot:
        figures.draw(facts, args.plot)
    return int(bool(facts.get("wrong")))


def in_turns(
    name: object, rounds: int, sides: Mapping[str, Callable[[int], T]]
) -> dict[str, list[T]]:
    """Run each side once in each round, with the round's number, and return all results."""
    found: dict[str, list[T]] = {side: [] for side in sides}
    for number in range(1, rounds + 1):
        for side, take in sides.items():
            print(f"{name}: {side}, {number} of {rounds}", file=sys.stderr, flush=True)
            found[side].append(take(number))
    return found
