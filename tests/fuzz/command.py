"""The program of scripts/fuzz.py: draws, tries, shrinks what differs, and says how to repeat it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.display import Display
from tests.fuzz.drawing import FEATURES, Choice, Draw, count, draw, least_covered, possible
from tests.fuzz.worker import Order, work
from tests.megatron_lm.harness.checkout import TAGS, checkout
from tests.reach.trial import BAD, Result

_STYLES = {Result.IDENTICAL: "green", **dict.fromkeys(BAD, "red")}
# Of so many seeds the one with the least covered pairs is taken.
_CANDIDATES = 40


def tags() -> list[str]:
    """Those that are there."""
    return [tag for tag in TAGS if checkout(tag)]


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    display = Display(sys.stderr if args.json else None)
    choices = read_choices(args.pairs) if args.pairs and args.pairs.exists() else []
    directory = Path(args.directory or tempfile.mkdtemp("-fuzz")).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    results: Counter[Result] = Counter()
    try:
        for number, one in enumerate(draws(args, choices)):
            if args.show:
                show(one)
                continue
            order = Order(
                *(one.seed, one.choice["tag"], str(directory / f"{one.seed}")),
                *(args.only, not args.no_shrink),
            )
            result = Result(_tried(order, display, number / args.count, args.json))
            results[result] += 1
            if result not in BAD:
                _remove(Path(order.directory))
            if result not in (Result.CANNOT_TRAIN, Result.REFUSED):
                choices.append(order.drawn.choice)
            if args.pairs:
                write_choices(args.pairs, choices)
    finally:
        display.close()
    display.line(", ".join(f"{number} {result}" for result, number in results.items()))
    if any(results[result] for result in BAD):
        display.line(f"see {directory}")
        return 1
    if not any(directory.iterdir()):
        directory.rmdir()
    return 0


def draws(args: argparse.Namespace, choices: Sequence[Choice]) -> Iterator[Draw]:
    """So many draws, each with the pairs that were drawn least so far; the first one is that of the
    seed itself, so that one command repeats it."""
    for number in range(args.count):
        first = args.seed + number * _CANDIDATES
        tag = args.tag or ""
        if not tag and (there := tags()) != list(TAGS):
            tag = there[first % len(there)]
        if number == 0 and not args.pairs:
            yield draw(first, tag)
        else:
            yield least_covered(range(first, first + _CANDIDATES), count(choices), tag)


def show(one: Draw) -> None:
    """Print what a seed draws."""
    print(f"seed {one.seed}: {' '.join(map('='.join, one.choice.items()))}")
    print(f"  {one.script} {' '.join(one.flags)}\n  {' '.join(one.settings)}")
    print("".join(f"  {json.dumps(fault)}\n" for fault in one.faults), end="")


def read_choices(path: Path) -> list[Choice]:
    """What was drawn so far, each as the values of its features. Raises ValueError for a file of
    another form."""
    try:
        rows = json.loads(path.read_text())["draws"]
        return [dict(pair.split("=") for pair in row.split()) for row in rows]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is no table of pairs: name a new file") from None


def write_choices(path: Path, choices: Sequence[Choice]) -> None:
    """A line for each draw, and how many pairs they have between them."""
    rows = ",\n".join(json.dumps(" ".join(map("=".join, one.items()))) for one in choices)
    drawn = count(choices)
    facts = {"possible": len(possible()), "drawn": len(drawn.keys() & set(possible()))}
    path.write_text(f'{{"pairs": {json.dumps(facts)}, "draws": [\n{rows}\n]}}\n')


def _remove(directory: Path) -> None:
    """What a trial has left beside its own folder, which is gone."""
    directory.with_suffix(".log").unlink(missing_ok=True)
    shutil.rmtree(directory.with_suffix(".data"), ignore_errors=True)


def _tried(order: Order, display: Display, part: float, as_json: bool) -> str:
    """Try one, say what became of it; returns the result."""
    title = f"seed {order.seed}, {order.tag}"
    row: dict[str, Any] = {}
    for said in work(order):
        if "status" in said:
            display.status(f"{title}: {said['status']}", part)
        row = said.get("row", row)
    result = Result(row["result"])
    repeat = f"scripts/fuzz.py {order.seed} --tag {order.tag}"
    if len(row["kept"]) < len(FEATURES) - 1:
        repeat += f" --only {' '.join(row['kept'])}"
    if as_json:
        facts = {"seed": order.seed, "repeat": repeat, "drawn": order.drawn.choice}
        print(json.dumps({**facts, **row}), flush=True)
    recoveries = ", ".join(f"{n} {name}" for name, n in Counter(row["recoveries"]).items())
    display.line(f"{title}: {result}; recoveries: {recoveries or 'none'}", _STYLES.get(result, ""))
    if result in BAD:
        display.line(f"{row['why']}\nrepeat it: {repeat}")
    return result
