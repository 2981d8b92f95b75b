"""One lost role from parity and from a buddy's copy.

    .venv/bin/python scripts/bench/parity_decoding.py [--megabytes N] [--rounds N]

Real vault processes on loopback with segments written by hand; the two ways take turns, each time
on another spare. Figures of a shared machine with two cores say something about the software only,
nothing about a network. Prints JSON, all rounds, nothing trimmed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from common.machine import ROOT, machine_facts

from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.planner import NoRestore, RestoreQuery, choose_restore
from deadpool_megatron.layout.records import Restore, Seat, Source
from deadpool_megatron.vault.schemes.parity_code import Coder

sys.path.insert(0, str(ROOT))  # the vaults are driven as in the tests
from tests.vault.harness import Cluster, Member
from tests.vault.schemes.coded import CodedGroup


class NoiseGroup(CodedGroup):
    """Bytes that are made faster."""

    def bytes_of(self, role: int, name: str, nbytes: int) -> bytes:
        return np.random.default_rng(role).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def decoded_megabytes_per_cpu_second(data: int, parities: int, lost: int) -> float:
    """The mathematics alone, in pieces as they come; MB of the result."""
    size, rounds = 4 << 20, 16
    coder = Coder(data, parities)
    pieces = {
        number: memoryview(bytearray(np.random.default_rng(number).bytes(size)))
        for number in range(lost, data + lost)
    }
    out = memoryview(bytearray(size))
    coder.decode(pieces, 0, out)
    started = time.process_time()
    for _ in range(rounds):
        coder.decode(pieces, 0, out)
    return rounds * size / 1e6 / (time.process_time() - started)


@contextmanager
def vaults(directory: Path, coded: CodedGroup, spares: int) -> Iterator[Cluster]:
    """Role 0 and its node are lost; there are so many nodes to restore it on."""
    running = Cluster(directory, coded.data + coded.parities + spares, coded.data)
    try:
        coded.write({node.number: node.directory for node in running.nodes}, {0})
        for node in running.nodes[1:]:
            node.start()
            node.close_epoch(1)
        yield running
    finally:
        running.stop()


def cpu_seconds(running: Cluster) -> dict[int, float]:
    """Processor time of each vault."""
    return {node.number: float(node.status()["cpu_seconds"]) for node in running.nodes[1:]}


def restore_once(
    running: Cluster, coded: CodedGroup, restore: Restore, epoch: int, spare: int
) -> dict[str, float]:
    """Seconds from the order to open the epoch until the member of role 0 has all its parts;
    processor seconds of the restoring vault and of those that sent."""
    seats = {role: Seat(role, 0, 0) for role in range(1, coded.data)}
    record = running.record(epoch, restore, {0: Seat(spare, 0, 0), **seats}, gone={0}, replicas=0)
    for node in running.nodes[1:]:
        node.close_epoch(epoch - 1)
    member = Member(running.nodes[spare], coded.layouts[0])
    before = cpu_seconds(running)
    started = time.perf_counter()
    running.open(record)
    member.client.register(coded.layouts[0], epoch)
    parts = member.restore(record)
    seconds = time.perf_counter() - started
    assert bytes(parts.part("shard")) == coded.part(0, "shard")
    parts.close()
    spent = {node: after - before[node] for node, after in cpu_seconds(running).items()}
    restorer = spent.pop(spare)
    return {"wall": seconds, "restoring_cpu": restorer, "sending_cpu": sum(spent.values())}


def compare(data: int, parities: int, megabytes: int, rounds: int) -> dict[str, object]:
    """Both ways in turn."""
    coded = NoiseGroup(data, parities, nbytes=megabytes << 20)
    first = data + parities
    with (
        tempfile.TemporaryDirectory() as directory,
        vaults(Path(directory), coded, 2 * rounds) as running,
    ):
        inventories = {node.number: node.inventory() for node in running.nodes[1:]}
        seats = {role: Seat(role, 0, 0) for role in range(data)}
        query = RestoreQuery(2, data, inventories, seats, seats, {1: NO_LIMIT})
        coded_restore = choose_restore(query)
        assert not isinstance(coded_restore, NoRestore)
        found: dict[str, list[dict[str, float]]] = {"parity": [], "buddy": []}
        epoch, spare = 2, first
        for turn in range(2 * rounds):
            way = ("parity", "buddy")[turn % 2]
            restore = coded_restore
            if way == "buddy":  # what the first round left on the first spare is a buddy's copy
                whole = {**coded_restore.sources[0]}
                whole |= {name: (Source(first, 0),) for name in ("shard", "tail")}
                sources = {**coded_restore.sources, 0: whole}
                restore = replace(coded_restore, sources=sources, recipes={})
            found[way].append(restore_once(running, coded, restore, epoch, spare))
            epoch, spare = epoch + 1, spare + 1
    medians = {
        way: {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}
        for way, rounds in found.items()
    }
    return {
        "data": data,
        "parities": parities,
        "megabytes": megabytes,
        "seconds": found,
        "median_seconds": medians,
        "ratio": {what: one / medians["buddy"][what] for what, one in medians["parity"].items()},
        "decoded_megabytes_per_cpu_second": decoded_megabytes_per_cpu_second(data, parities, 1),
    }


def main() -> None:
    """Print the figures of some groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    groups = [(2, 1), (4, 1), (4, 2)]
    found = [compare(k, m, arguments.megabytes, arguments.rounds) for k, m in groups]
    print(json.dumps({"facts": machine_facts(), "groups": found}, indent=1))


if __name__ == "__main__":
    main()
