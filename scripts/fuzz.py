#!/usr/bin/env python
"""Draw configurations and faults at random, and hold each run against an undisturbed one.

    .venv/bin/python scripts/fuzz.py 7
    .venv/bin/python scripts/fuzz.py 7 --count 20 --pairs pairs.json
    .venv/bin/python scripts/fuzz.py 7 --tag core_v0.17.1 --only saves first

A draw is a value of each feature of tests/fuzz/features.toml: layout, precision, optimizer,
schedule, experts, data, saves, scheme of protection, faults and so on. A seed gives the same draw
always; with --count the next ones are those of later seeds whose pairs of values were drawn least.
Steps, evaluations, hashes of the state, printed lines, points of TensorBoard, tensors of
checkpoints, exit status, processes and shared memory have to be those of the run without faults.
What differs is shrunk: features become plain for as long as it still differs; a command that
repeats it is printed.

Exit status: 0 all are equal; 1 something differs, or does not train: its directory is named; 2 bad
arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "bench"))

from common.ending import ending_in_order

from tests.fuzz import command, drawing


@ending_in_order()
def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int, metavar="SEED", help="of the first draw")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="draws (default: 1)")
    parser.add_argument(
        "--tag",
        choices=command.TAGS,
        help="of Megatron-LM (default: a drawn one)",
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=drawing.FEATURES,
        metavar="FEATURE",
        help="the others are plain",
    )
    parser.add_argument(
        "--pairs", type=Path, metavar="FILE", help="read which pairs were drawn, and add these"
    )
    parser.add_argument("--directory", metavar="DIR", help="of the runs (default: a temporary one)")
    parser.add_argument("--show", action="store_true", help="print the draws, and run none")
    parser.add_argument("--no-shrink", action="store_true", help="leave what differs as it is")
    parser.add_argument("--json", action="store_true", help="an object for each draw")
    args = parser.parse_args()
    if args.count < 1 or args.seed < 0:
        parser.error("SEED and --count: a natural number")
    if args.only and args.count > 1:
        parser.error("--only is of one draw")
    if not command.tags() or (args.tag and args.tag not in command.tags()):
        parser.error(f"no source of Megatron-LM {args.tag or ''} is there: see docs/testing.md")
    try:
        return command.run(args)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
