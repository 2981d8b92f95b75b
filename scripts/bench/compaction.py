#!/usr/bin/env python
"""What it costs to ship masters as halves, and at which link rate it pays.

    .venv/bin/python scripts/bench/compaction.py [--parameters N] [--runs N] [--out FILE]

Three parts. The codec alone: CPU nanoseconds per parameter to split masters into low halves, to put
them together again, and to check-sum the result. Shipments between two vaults in one process over
a socket, whole and as halves: bytes per parameter, CPU seconds of both vaults per GB of state,
sealing of the own slot and of the base included; the first two shipments of each kind, which give
the slots their memory, do not count. And whole runs, as in ``protection.py`` but in bf16, whole and
as halves in turns, one node of each killed: bytes and CPU seconds per step, and whether they
computed the same.

Halves pay where 2 bytes on the wire take longer than what they cost: the rate at which a link takes
as long for them as one core for the difference is in the output (``pays_below_gbps``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import trainings
from common.machine import ROOT, machine_facts, write_facts
from common.struck import SIZES, Protected, run_protected, sizes_of

from deadpool_megatron.cli.show.compare import compare_results
from deadpool_megatron.cli.show.story import summary
from deadpool_megatron.vault.compaction import (
    Exceptions,
    Splitter,
    join_in_place,
    low_places,
)
from deadpool_megatron.vault.segment import checksum

sys.path.insert(0, str(ROOT))  # the pair of vaults is that of the tests
from tests.vault.halving import Pair, Shape

_SAVED_BYTES = 2
# Name -> --deadpool-compaction.
FLAGS = {"whole": "off", "halves": "on"}


def timed(action: Callable[[], object], rounds: int, parameters: int) -> dict[str, float]:
    """CPU nanoseconds per parameter."""
    found = []
    for _ in range(rounds):
        started = time.process_time()
        action()
        found.append((time.process_time() - started) / parameters * 1e9)
    return summary(found)


def codec(shape: Shape, parameters: int, rounds: int) -> dict[str, Any]:
    """Split, join and checksum, each on the whole part."""
    part = shape.shard(0)
    base, arrived = memoryview(shape.weights(part)), bytearray(part)

    def split() -> Exceptions:
        splitter = Splitter(memoryview(part), shape.masters)
        for _ in splitter.pieces():
            pass
        assert splitter.exceptions is not None
        return splitter.exceptions

    exceptions = split()
    low = b"".join(bytes(piece) for piece in Splitter(memoryview(part), shape.masters).pieces())

    def put_low() -> None:
        reached = 0
        for begin, end in low_places(shape.masters):
            arrived[begin:end] = low[reached : reached + end - begin]
            reached += end - begin

    def join() -> None:
        join_in_place(memoryview(arrived), shape.masters, base, exceptions)

    joins = []
    for _ in range(rounds):  # in place: the low halves have to be there each time
        put_low()
        joins.append(timed(join, 1, parameters)["mean"])
    assert arrived == part
    return {
        "split_ns_per_parameter": timed(split, rounds, parameters),
        "join_ns_per_parameter": summary(joins),
        "checksum_ns_per_parameter": timed(lambda: checksum(memoryview(part)), rounds, parameters),
        "exceptions": int(exceptions.places.size),
    }


def shipments(
    shape: Shape, parameters: int, rounds: int, compaction: str, base: Path
) -> dict[str, Any]:
    """Generations one after the other; CPU seconds are those of the whole process."""
    pair = Pair(base, shape, compaction)
    cpu, wall, sent = [], [], []
    try:
        for iteration in range(rounds + 2):
            part = shape.shard(iteration)
            weights = shape.weights(part)
            shipped, started, used = pair.shipped, time.perf_counter(), time.process_time()
            if compaction == "on":
                pair.keep(iteration, weights)
            pair.own(iteration, part)
            pair.wait(iteration)
            cpu.append(time.process_time() - used)
            wall.append(time.perf_counter() - started)
            sent.append((pair.shipped - shipped) / parameters)
        pair.check(rounds + 1)
        assert pair.as_halves == (rounds + 2 if compaction == "on" else 0)
    finally:
        pair.stop()
    return {
        "bytes_per_parameter": summary(sent[2:]),
        "cpu_seconds_per_gb_of_state": summary([each / (shape.nbytes / 1e9) for each in cpu[2:]]),
        "seconds": summary(wall[2:]),
        "runs": {"cpu_seconds": cpu[2:], "seconds": wall[2:]},
    }


def whole_runs(size: str, rounds: int, steps: int, base: Path) -> dict[str, Any]:
    """The same bf16 training under both kinds of copies, in turns."""
    count = trainings.parameters(sizes_of(size))
    runs = {name: list[Protected]() for name in FLAGS}
    for number in range(1, rounds + 1):
        for name, compaction in FLAGS.items():
            print(f"{size}: {name}, {number} of {rounds}", file=sys.stderr, flush=True)
            flags = ["--deadpool-compaction", compaction]
            found = run_protected(size, flags, steps, base, "node", ["--bf16"])
            runs[name].append(found)
    results = [run.result for found in runs.values() for run in found if run.result is not None]
    return {
        "size": size,
        "parameters": count,
        "bit_identical": all(compare_results(results[0], one).identical for one in results[1:]),
        **{name: _facts_of(found, count) for name, found in runs.items()},
    }


def _facts_of(runs: list[Protected], count: int) -> dict[str, Any]:
    measured = [run.measured for run in runs]
    shipped = [(one.shipped_bytes_per_step or 0.0) / count for one in measured]
    return {
        "shipped_bytes_per_parameter_and_step": summary(shipped),
        "own_bytes_per_parameter": summary([run.own_bytes / count for run in runs]),
        "kept_for_others_bytes_per_parameter": summary([run.kept_bytes / count for run in runs]),
        "cpu_seconds_per_step": summary([one.cpu_seconds_per_step for one in measured]),
        "step_seconds": summary([s for one in measured for s in one.step_seconds]),
        "gate_seconds": sum(one.gate_seconds or 0.0 for one in measured),
        "runs": [one.step_seconds for one in measured],
    }


def main() -> int:
    """Run from the command line; answers the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=20_000_000, metavar="N")
    parser.add_argument("--rounds", type=int, default=10, metavar="N")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="whole runs of each kind")
    parser.add_argument("--size", choices=SIZES, default="5M", help="of their model")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured per run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args()
    if args.parameters < 100 or args.rounds < 2:
        parser.error("--parameters must be at least 100 and --rounds at least 2")
    shape, count = Shape.of(args.parameters), args.parameters
    facts: dict[str, Any] = {
        "bench": "compaction",
        "machine": machine_facts(),
        "parameters": count,
        "codec": codec(shape, count, args.rounds),
        "shipments": {},
    }
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-", dir="/dev/shm") as directory:
        for name, compaction in FLAGS.items():
            base = Path(directory) / name
            base.mkdir()
            found = shipments(shape, count, args.rounds, compaction, base)
            facts["shipments"][name] = found
    if args.runs:
        with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as directory:
            facts["runs"] = whole_runs(args.size, args.runs, args.steps, Path(directory))
    cost = {
        name: found["cpu_seconds_per_gb_of_state"]["mean"] * shape.nbytes / 1e9 / count
        for name, found in facts["shipments"].items()
    }
    more = cost["halves"] - cost["whole"]
    facts["more_ns_per_parameter"] = more * 1e9
    facts["pays_below_gbps"] = _SAVED_BYTES * 8 / (more * 1e9) if more > 0 else None
    write_facts(args.out, facts)
    return 0 if not args.runs or facts["runs"]["bit_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
