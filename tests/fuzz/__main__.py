"""Draw configurations and faults at random, and hold each run against an undisturbed run.

    .venv/bin/python -m tests.fuzz 7
    .venv/bin/python -m tests.fuzz 7 --count 20 --pairs pairs.json
    .venv/bin/python -m tests.fuzz 7 --tag core_v0.17.1 --only saves first

A draw is a value of each feature of tests/fuzz/features.toml: layout, precision, optimizer,
schedule, experts, data, saves, scheme of protection, faults and so on. A seed always gives the same
draw; with --count further draws come from later seeds whose pairs of values were drawn least.
Steps, evaluations, hashes of the state, printed lines, points of TensorBoard, tensors of
checkpoints, exit status, processes and shared memory have to be those of the run without faults.
A draw that differs is shrunk: features become plain while it still differs; a command that repeats
it is printed.

Exit status: 0 all are equal; 1 something differs, or does not train: its directory is named; 2 bad
arguments.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.display import Display
from tests.fuzz import draws
from tests.fuzz.worker import Order, work
from tests.megatron_lm.harness.checkout import TAGS, checkout
from tests.reach.trial import BAD, Result

_STYLES = {Result.IDENTICAL: "green", **dict.fromkeys(BAD, "red")}
# The number of seeds of which that with the least covered pairs is taken.
_CANDIDATES = 40


def tags() -> list[str]:
    """Return the tags that have a checkout."""
    return [tag for tag in TAGS if checkout(tag)]


def run(args: argparse.Namespace) -> int:
    """Carry out the command line; returns the exit status."""
    display = Display(sys.stderr if args.json else None)
    choices = draws.read_choices(args.pairs) if args.pairs and args.pairs.exists() else []
    directory = Path(args.directory or tempfile.mkdtemp("-fuzz")).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    results: Counter[Result] = Counter()
    try:
        for number, draw in enumerate(next_draws(args, choices)):
            if args.show:
                show(draw)
                continue
            order = Order(
                *(draw.seed, draw.choice["tag"], str(directory / f"{draw.seed}")),
                *(args.only, not args.no_shrink),
            )
            drawn = order.drawn
            result = Result(_tried(order, display, number / args.count, args.json))
            results[result] += 1
            if result not in BAD:
                _remove(Path(order.directory))
            if result not in (Result.CANNOT_TRAIN, Result.REFUSED):
                choices.append(drawn.choice)
            if args.pairs:
                draws.write_choices(args.pairs, choices)
    finally:
        display.close()
    display.line(", ".join(f"{number} {result}" for result, number in results.items()))
    if any(results[result] for result in BAD):
        display.line(f"see {directory}")
        return 1
    if not any(directory.iterdir()):
        directory.rmdir()
    return 0


def next_draws(args: argparse.Namespace, choices: Sequence[draws.Choice]) -> Iterator[draws.Draw]:
    """Yield draws, each with the pairs that were drawn least so far; first the draw of the seed
    itself, so that a command repeats it."""
    for number in range(args.count):
        first = args.seed + number * _CANDIDATES
        tag = args.tag or ""
        if not tag and (there := tags()) != list(TAGS):
            tag = there[first % len(there)]
        if number == 0 and not args.pairs:
            yield draws.draw(first, tag)
        else:
            yield draws.min_covered(range(first, first + _CANDIDATES), draws.count(choices), tag)


def show(draw: draws.Draw) -> None:
    """Print what a seed draws."""
    print(f"seed {draw.seed}: {' '.join(map('='.join, draw.choice.items()))}")
    print(f"  {draw.script} {' '.join(draw.flags)}\n  {' '.join(draw.settings)}")
    print("".join(f"  {json.dumps(fault)}\n" for fault in draw.faults), end="")


def _remove(directory: Path) -> None:
    """Remove a trial's files outside its own folder, which is gone."""
    directory.with_suffix(".log").unlink(missing_ok=True)
    shutil.rmtree(directory.with_suffix(".data"), ignore_errors=True)


def _tried(order: Order, display: Display, part: float, as_json: bool) -> str:
    """Try a draw, and print and return its result."""
    title = f"seed {order.seed}, {order.tag}"
    row: dict[str, Any] = {}
    for message in work(order):
        if "status" in message:
            display.status(f"{title}: {message['status']}", part)
        row = message.get("row", row)
    result = Result(row["result"])
    repeat = f"python -m tests.fuzz {order.seed} --tag {order.tag}"
    if len(row["kept"]) < len(draws.FEATURES) - 1:
        repeat += f" --only {' '.join(row['kept'])}"
    if as_json:
        facts = {"seed": order.seed, "repeat": repeat, "drawn": order.drawn.choice}
        print(json.dumps({**facts, **row}), flush=True)
    recoveries = ", ".join(f"{n} {name}" for name, n in Counter(row["recoveries"]).items())
    display.line(f"{title}: {result}; recoveries: {recoveries or 'none'}", _STYLES.get(result, ""))
    if result in BAD:
        display.line(f"{row['why']}\nrepeat it: {repeat}")
    return result


def main() -> int:
    """Run from the command line; returns the exit status."""
    # Through every finally, as an exception: trials have sessions of their own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, only = parser.add_argument, {"choices": draws.FEATURES, "metavar": "FEATURE"}
    add("seed", type=int, metavar="SEED", help="of the first draw")
    add("--count", type=int, default=1, metavar="N", help="draws (default: 1)")
    add("--tag", choices=TAGS, help="of Megatron-LM (default: a drawn one)")
    add("--only", nargs="*", help="the others are plain", **only)
    add("--pairs", type=Path, metavar="FILE", help="read which pairs were drawn, and add these")
    add("--directory", metavar="DIR", help="of the runs (default: a temporary one)")
    add("--show", action="store_true", help="print the draws, and run none")
    add("--no-shrink", action="store_true", help="leave what differs as it is")
    add("--json", action="store_true", help="an object for each draw")
    args = parser.parse_args()
    if args.count < 1 or args.seed < 0:
        parser.error("SEED and --count: a natural number")
    if args.only and args.count > 1:
        parser.error("--only is of one draw")
    if not tags() or (args.tag and args.tag not in tags()):
        parser.error(f"no source of Megatron-LM {args.tag or ''} is there: see docs/testing.md")
    try:
        return run(args)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
