#!/usr/bin/env python
"""Count the files of the package that a lost node, an iteration and a sealing enter.

    .venv/bin/python scripts/walk.py
    .venv/bin/python scripts/walk.py --json --out walk.json

A run of the embedded trainer on four nodes and a spare, with a profile hook in each of its
processes (coordinator, standby, agents, vaults, members), loses a node that coordinates nothing.

  lost node    files entered between the kill and the end of the recovery (the first iteration that
               the run finishes with its new node), and not in the five seconds before; and how
               many with those that are entered anyway
  iteration    files entered in more than half of the last iterations before the kill, so that
               occasional work such as beats does not count
  sealing      stays, files and returns of one call of --entry, in the thread that runs it: its
               functions in the order in which they are called for the first time. A stay is a run
               of functions of one file; a return is a stay in a file that had a stay before: stays
               less files. Counted is the median of the calls that seal something

A file is entered when a function of it is called; being imported is not counted. All files of the
package are, those included that only hold values. A process that is started with -I is not seen.
Figures differ by a few files from run to run, where waits end in another order.

Exit status: 0 counted; 1 the run failed: its directory is named; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "bench")]

from common.machine import machine_facts, write_facts  # noqa: E402
from common.termination import orderly_termination  # noqa: E402
from soaking import rounds  # noqa: E402
from walking.sitecustomize import RECORD_BYTES  # noqa: E402

import deadpool_megatron  # noqa: E402
from deadpool_megatron.events import Kind, read_events  # noqa: E402

# Of iterations before the kill.
_WARM_SECONDS = 8.0
_BEFORE_SECONDS = 5.0
_ITERATIONS = 10
_MAX_WAIT_SECONDS = 240.0
_ENTRY = "vault/role_worker.py:_seal"
Notes = list[tuple[str, float, str, str]]  # kind, wall seconds, process and thread, file


@orderly_termination()
def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--entry",
        default=_ENTRY,
        metavar="FILE:FUNCTION",
        help="of the sealing (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="the files, too, and of what machine")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON there, the table here")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="deadpool-walk-"))
    try:
        times = run(base, args.entry)
    except rounds.SoakError as error:
        print(f"{error}\nrun directory: {base}", file=sys.stderr)
        return 1
    facts = count(notes(base / "notes"), *times)
    shutil.rmtree(base)
    if args.json or args.out:
        write_facts(args.out, {"entry": args.entry, "machine": machine_facts(), **facts})
    if not args.json:
        for name, found in facts.items():
            shown = ", ".join(f"{value} {key}" for key, value in found.items() if key != "walk")
            print(f"{name:12} {shown}")
    return 0


def run(base: Path, entry: str) -> tuple[list[float], float, float]:
    """Return when each iteration was finished, when the node was killed, and when it was over."""
    (base / "notes").mkdir()
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent / "walking"), os.environ.get("PYTHONPATH", "")]
        ),
        "DEADPOOL_WALK": str(base / "notes"),
        "DEADPOOL_WALK_PACKAGE": str(Path(deadpool_megatron.__file__).parent),
        "DEADPOOL_WALK_ENTRY": entry,
    }
    round_ = rounds.start(base / "run", 100_000, time.monotonic(), None, ("--spares", "1"))
    try:
        rounds.follow(round_, lambda: round_.newest >= _ITERATIONS, _MAX_WAIT_SECONDS, "iterations")
        rounds.pause(round_, _WARM_SECONDS)
        killed = kill_a_node(round_)
        rounds.follow(round_, lambda: round_.recoveries > 0, _MAX_WAIT_SECONDS, "the recovery")
    finally:
        rounds.end(round_)
    at: dict[Kind, list[float]] = {Kind.STEP: [], Kind.RECOVERED: []}
    for event in read_events(round_.run.events):
        at.get(event.kind, []).append(event.wall_seconds)
    return at[Kind.STEP], killed, at[Kind.RECOVERED][0]


def kill_a_node(round_: rounds.Round) -> float:
    """Kill all processes of the first node with a role, the last to be appointed to coordinate;
    return when."""
    listing = round_.run.node_listings()[min(node for node, _ in round_.seats().values())]
    now = time.time()
    for pid in (listing["agent"], listing["vault"], *listing["members"].values()):
        os.kill(int(pid), signal.SIGKILL)
    return now


def notes(folder: Path) -> Notes:
    """Return what all processes have noted, in order of time."""
    found: Notes = []
    for file in folder.iterdir():
        with open(file, "rb") as stream:
            while line := stream.read(RECORD_BYTES).rstrip(b"\0").decode():
                kind, seconds, thread, name = line.split()
                found.append((kind, float(seconds), f"{file.name} {thread}", name))
    return sorted(found, key=lambda note: note[1])


def count(
    found: Notes, steps: list[float], killed: float, recovered: float
) -> dict[str, dict[str, Any]]:
    """Return what each walk enters."""

    def entered(begin: float, end: float) -> set[str]:
        return {name for kind, at, _, name in found if kind == "entered" and begin <= at < end}

    all_of_it = entered(killed, recovered)
    lost = all_of_it - entered(killed - _BEFORE_SECONDS, killed)
    times = [at for at in steps if at < killed][-_ITERATIONS - 1 :]
    seen = Counter(name for begin, end in pairwise(times) for name in entered(begin, end))
    iteration = {name for name, often in seen.items() if often > (len(times) - 1) / 2}
    calls = walks(note for note in found if killed - _BEFORE_SECONDS <= note[1] < killed)
    largest = max(map(len, calls))
    sealing = sorted((call for call in calls if len(call) > largest / 2), key=len)
    walk = sealing[len(sealing) // 2]
    files = len(set(walk))
    return {
        "lost node": {
            "files": len(lost),
            "files with those of before": len(all_of_it),
            "walk": sorted(lost),
        },
        "iteration": {"files": len(iteration), "walk": sorted(iteration)},
        "sealing": {"stays": len(walk), "files": files, "returns": len(walk) - files, "walk": walk},
    }


def walks(found: Iterable[tuple[str, float, str, str]]) -> list[list[str]]:
    """Return the stays of each call of the entry that has ended."""
    under_way: dict[str, list[str]] = defaultdict(list)
    whole: list[list[str]] = []
    for kind, _, thread, name in found:
        if kind == "left":
            whole.append(under_way.pop(thread, []))
        elif kind == "called" and under_way[thread][-1:] != [name]:
            under_way[thread].append(name)
    return whole


if __name__ == "__main__":
    sys.exit(main())
