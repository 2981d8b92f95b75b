"""Cut launch configurations of Megatron-LM down to a CPU, and train each with one node lost in it.

    .venv/bin/python -m tests.reach FILE.jsonl
    .venv/bin/python -m tests.reach FILE.jsonl --run --only ID --json

FILE has an object on each line: id, script, flags (an object: a text, a list of texts, or true for
a flag without a value). tests/reach/rules.toml changes each flag: few layers, small sizes, two
ranks for each kind of parallelism, mock data. Flags that need a GPU are left out and named. With
--run the result is held against an undisturbed run, bit by bit. The lines of --json without result
and why are those of tests/reach/shrunk.jsonl.

Exit status: 0 all that is not refused is bit-identical, or was only cut down; 1 something does not
train, or differs: its directory is named; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from deadpool_megatron.cli.display import Display
from deadpool_megatron.megatron import stand_ins
from tests.common import forks
from tests.megatron_lm.harness.parsing import in_checkout
from tests.reach.shrink import Known, shrink
from tests.reach.trial import BAD, Result, refusal, trial

_STYLES = {Result.IDENTICAL: "green", **dict.fromkeys(BAD, "red")}


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.reach",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="configurations, one a line")
    parser.add_argument("--run", action="store_true", help="train them, each twice")
    parser.add_argument("--only", nargs="+", default=(), metavar="ID", help="these alone")
    parser.add_argument("--json", action="store_true", help="an object for each configuration")
    args = parser.parse_args()
    if not args.file.is_file():
        parser.error(f"{args.file} is no file")
    rows = [json.loads(line) for line in args.file.read_text().splitlines()]
    rows = [row for row in rows if row["id"] in args.only or not args.only]
    lines = map(json.loads, in_checkout("flags"))
    known = {flag: Known(choices or (), takes_value) for flag, choices, takes_value in lines}
    stand_ins.install()
    display, work = Display(sys.stderr if args.json else None), Path(tempfile.mkdtemp("-reach"))
    results: Counter[Result] = Counter()
    try:
        for number, row in enumerate(rows):
            small = shrink(row["id"], row["script"], row["flags"], known)
            display.status(f"{small.id} ({number + 1} of {len(rows)})", number / len(rows))
            result, cause = Result.REFUSED, refusal(small)
            if not cause:
                result, cause = trial(work / small.id, small) if args.run else (Result.CUT_DOWN, "")
            results[result] += 1
            if args.json:
                print(json.dumps({**asdict(small), "result": result, "why": cause}), flush=True)
            more = f"see {work}" if result in BAD else cause or f"left out: {small.without}"
            display.line(f"{small.id}: {result}; {more}", _STYLES.get(result, ""))
    finally:
        forks.stop()
        display.close()
    display.line(", ".join(f"{number} {result}" for result, number in results.items()))
    failed = any(results[result] for result in BAD)
    if not failed:
        shutil.rmtree(work)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
