"""The command line of a bench, its sides in turns, and its end."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from common.machine import machine_facts, write_facts
from common.trainings import BenchError

Facts = dict[str, Any]
T = TypeVar("T")


def at_least(minimum: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return the type of a flag with this minimum."""

    def number(text: str) -> float:
        value = kind(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum:g}")
        return value

    return number


def parser_of(doc: str | None, rounds: int, of: str, steps: int = 0) -> argparse.ArgumentParser:
    """Return a parser with the flags that benches share. ``rounds`` and ``steps`` are defaults (0
    steps: no such flag); ``of``: the help of ``--rounds``, its unit."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = at_least(1)
    parser.add_argument("--rounds", type=count, default=rounds, metavar="N", help=of)
    if steps:
        kind, text = at_least(2), "measured per run"
        parser.add_argument("--steps", type=kind, default=steps, metavar="N", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    return parser


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


def run_bench(
    name: str,
    out: Path | None,
    measure: Callable[[Path], Facts],
    is_good: Callable[[Facts], bool] = lambda _: True,
) -> int:
    """Measure in a temporary folder, and write the facts. Returns the exit status: 1 if a run
    failed, or the facts are not good."""
    facts: Facts = {"bench": name, "machine": machine_facts()}
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as base:
        try:
            facts |= measure(Path(base))
        except BenchError as error:
            print(f"{name} bench: {error}", file=sys.stderr)
            return 1
    write_facts(out, facts)
    return 0 if is_good(facts) else 1
