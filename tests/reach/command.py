"""The program of scripts/reach.py: cuts configurations down and tries them one after the other."""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from deadpool_megatron.cli.display import Display
from deadpool_megatron.platform import stand_ins
from tests.common import forks
from tests.megatron_lm.harness.parsing import in_checkout
from tests.reach.shrinking import Known, Shrunk, chosen, shrink
from tests.reach.trial import BAD, Result, refusal, trial

_STYLES = {Result.IDENTICAL: "green", **dict.fromkeys(BAD, "red")}
SHRUNK = Path(__file__).parent / "shrunk.jsonl"


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    rows = [json.loads(line) for line in args.file.read_text().splitlines()]
    rows = [row for row in rows if row["id"] in args.only or not args.only]
    lines = map(json.loads, in_checkout("flags"))
    known = {flag: Known(choices or (), takes_value) for flag, choices, takes_value in lines}
    stand_ins.install()
    display, work = Display(sys.stderr if args.json else None), Path(tempfile.mkdtemp("-reach"))
    found: dict[Result, list[Shrunk]] = {result: [] for result in Result}
    try:
        for number, row in enumerate(rows):
            small = shrink(row["id"], row["script"], row["flags"], known)
            display.status(f"{small.id} ({number + 1} of {len(rows)})", number / len(rows))
            result, why = Result.REFUSED, refusal(small)
            if not why:
                result, why = trial(work / small.id, small) if args.run else (Result.CUT_DOWN, "")
            found[result].append(small)
            if args.json:
                print(json.dumps({**asdict(small), "result": result, "why": why}), flush=True)
            else:
                without = ", ".join(small.without) or "nothing"
                more = why if result is Result.REFUSED else f"left out: {without}"
                display.line(f"{small.id}: {result}; {more}", _STYLES.get(result, ""))
    finally:
        forks.stop()
        display.close()
    display.line(", ".join(f"{len(ones)} {result}" for result, ones in found.items() if ones))
    if args.write:
        good = chosen(found[Result.IDENTICAL] + found[Result.CUT_DOWN], args.write)
        SHRUNK.write_text("".join(json.dumps(asdict(small)) + "\n" for small in good))
    if failed := [one.id for result in BAD for one in found[result]]:
        display.line(f"see {work}: {', '.join(failed)}")
    else:
        shutil.rmtree(work)
    return int(bool(failed))
