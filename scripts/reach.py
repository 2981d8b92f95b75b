#!/usr/bin/env python
"""Cut launch configurations of Megatron-LM down to a CPU, and train each with one node lost in it.

    .venv/bin/python scripts/reach.py FILE.jsonl
    .venv/bin/python scripts/reach.py FILE.jsonl --run --only ID --json

FILE has an object on each line: id, script, flags (an object: a text, a list of texts, or true for
a flag without a value). What tests/reach/rules.toml says is done with each flag: few layers, small
sizes, two ranks for each kind of parallelism, mock data. What only a GPU runs is left out and
named. With --run the result is held against an undisturbed run, bit by bit.

Exit status: 0 all that is not refused is bit-identical, or was only cut down; 1 something does not
train, or differs: its directory is named; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.reach import command


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="configurations, one a line")
    parser.add_argument("--run", action="store_true", help="train them, each twice")
    parser.add_argument("--only", nargs="+", default=(), metavar="ID", help="these alone")
    parser.add_argument("--json", action="store_true", help="an object for each configuration")
    parser.add_argument(
        "--write", type=int, default=0, metavar="N", help="keep N for tests/reach/shrunk.jsonl"
    )
    args = parser.parse_args()
    if not args.file.is_file():
        parser.error(f"{args.file} is no file")
    return command.run(args)


if __name__ == "__main__":
    sys.exit(main())
