#!/usr/bin/env python
"""Do copies of the members of one node gain by taking turns?

    .venv/bin/python scripts/bench/side_copies.py [--members N] [--megabytes N] [--out FILE]

Each member copies its bytes into shared memory, as it does after each update: one alone, all at the
same moment, and all in turns, a piece at a time (REFT's coordination of the ranks of a node). The
ways take turns; the seconds are from the moment that all begin until the last byte of a member is
there. On a CPU both ends of a copy are host memory, so this says what the host's memory makes of
copies that meet, and nothing of the links between devices and host.
"""

from __future__ import annotations

import mmap
import multiprocessing
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from multiprocessing.synchronize import Barrier, Lock
from pathlib import Path
from typing import Any

import numpy as np
from common.command import at_least, parser_of, run_bench

WAYS = ("alone", "at once", "in turns")
_PIECE_BYTES = 4 << 20
_PATIENCE_SECONDS = 60.0


def member(
    number: int,
    path: str,
    nbytes: int,
    rounds: int,
    start: Barrier,
    turn: Lock,
    told: Any,
) -> None:
    """Copy when the others do, in each way, and tell how long it took."""
    with open(path, "r+b") as file:
        slot = np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)
    source = np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)
    slot[:] = source
    for _ in range(rounds):
        for way in WAYS:
            start.wait(_PATIENCE_SECONDS)
            if way == "alone" and number:
                continue
            began = time.perf_counter()
            for first in range(0, nbytes, _PIECE_BYTES):
                piece = slice(first, first + _PIECE_BYTES)
                with turn if way == "in turns" else nullcontext():
                    slot[piece] = source[piece]
            told.put((way, time.perf_counter() - began))


def measure(members: int, nbytes: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds of each copy, by the way it went."""
    context = multiprocessing.get_context("spawn")
    start, turn, told = context.Barrier(members), context.Lock(), context.Queue()
    processes = []
    for number in range(members):
        path = directory / f"slot-{number}"
        path.write_bytes(bytes(nbytes))
        given = (number, str(path), nbytes, rounds, start, turn, told)
        processes.append(context.Process(target=member, args=given))
        processes[-1].start()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds * (1 + (len(WAYS) - 1) * members)):
        way, seconds = told.get(timeout=_PATIENCE_SECONDS)
        found[way].append(seconds)
    for process in processes:
        process.join(_PATIENCE_SECONDS)
    return found


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 20, "of all three ways")
    some = at_least(1)
    parser.add_argument("--members", type=some, default=2, metavar="N", help="of the node")
    parser.add_argument("--megabytes", type=some, default=64, metavar="N", help="of each member")
    args = parser.parse_args()

    def measured(_: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="deadpool-bench-", dir="/dev/shm") as directory:
            found = measure(args.members, args.megabytes << 20, args.rounds, Path(directory))
        return {
            "members": args.members,
            "megabytes": args.megabytes,
            "piece_bytes": _PIECE_BYTES,
            "median_seconds": {way: statistics.median(times) for way, times in found.items()},
            "seconds": found,
        }

    return run_bench("side-copies", args.out, measured)


if __name__ == "__main__":
    sys.exit(main())
