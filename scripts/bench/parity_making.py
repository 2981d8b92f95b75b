"""What it costs to make parity blocks, of roles of 64 MB on loopback.

    .venv/bin/python scripts/bench/parity_making.py

Processor seconds of the vaults for each GB of shards, everything in; figures of a shared machine
with two cores say something about the software only. Prints a line for each group.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common.machine import ROOT

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers

sys.path.insert(0, str(ROOT))  # the vaults are driven as in the tests
from tests.vault.harness import Cluster, Member, cluster, make_layout

BYTES = 64 << 20
WARM_UP, ITERATIONS = 3, 12


def cpu_seconds(running: Cluster) -> list[float]:
    """Of each node's vault."""
    return [float(node.status()["cpu_seconds"]) for node in running.nodes]


def measure(data: int, parities: int) -> str:
    """A group of ``data`` roles with ``parities`` blocks, generation after generation."""
    noise = np.random.default_rng(0).integers(0, 256, BYTES, dtype=np.uint8)
    with (
        tempfile.TemporaryDirectory() as directory,
        cluster(Path(directory), data + parities, roles=data) as running,
    ):
        plan = ProtectionPlan(SchemeNumbers(SchemeKind.PARITY, group=data))
        running.open(replace(running.record(1, replicas=parities), protection=plan))
        layouts = [make_layout(role, BYTES) for role in range(data)]
        members = [Member(running.nodes[role], layouts[role]) for role in range(data)]
        for member in members:
            member.client.register(member.layout, 1)
        for iteration in range(WARM_UP + ITERATIONS):
            if iteration == WARM_UP:
                before, started = cpu_seconds(running), time.perf_counter()
            for member in members:
                writer = member.client.begin(Generation(1, iteration), 1)
                np.frombuffer(writer.part("shard"), dtype=np.uint8)[:] = noise
                writer.fill({"shard": BYTES, "tail": 1000, "extras@step": 777})
            for member in members:
                assert member.wait(Generation(1, iteration)) == "committed"
        seconds = time.perf_counter() - started
        spent = [a - b for a, b in zip(cpu_seconds(running), before, strict=True)]
    gigabytes = ITERATIONS * data * BYTES / 1e9
    return (
        f"k = {data}, m = {parities}: owners {sum(spent[:data]) / gigabytes:.2f} s/GB,"
        f" each holder {sum(spent[data:]) / parities / gigabytes:.2f} s/GB,"
        f" {seconds / ITERATIONS:.2f} s per generation"
    )


def main() -> None:
    """Print the figures of some groups."""
    for data, parities in ((2, 1), (4, 1), (4, 2)):
        print(measure(data, parities), flush=True)


if __name__ == "__main__":
    main()
