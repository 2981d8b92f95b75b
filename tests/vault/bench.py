"""Seal, ship and verify a 256 MB role on loopback: ``python -m tests.vault.bench``.

Figures of one run on two shared cores say something about the software only, nothing about a
network: loopback copies twice through the kernel.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash

from deadpool_megatron.layout.records import Generation, Restore, Seat
from tests.vault.harness import Member, cluster, make_layout, sources_from

MEGABYTES = 256
ITERATIONS = 12


def main() -> None:
    """Print one line for each figure."""
    nbytes = MEGABYTES << 20
    layout = make_layout(0, nbytes)
    with (
        tempfile.TemporaryDirectory() as directory,
        cluster(Path(directory), 3, roles=2, connect_seconds=10.0) as running,
    ):
        running.open(running.record(1))
        member = Member(running.nodes[0], layout)
        started = time.perf_counter()
        member.client.register(layout, 1)
        print(f"register (2 slots reserved): {time.perf_counter() - started:.3f} s")
        noise = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
        seconds, fills = [], []
        before = [running.nodes[n].status()["cpu_seconds"] for n in range(2)]
        for iteration in range(ITERATIONS):
            generation = Generation(1, iteration)
            writer = member.client.begin(generation, 1)
            target = np.frombuffer(writer.part("shard"), dtype=np.uint8)
            target[:] = noise
            started = time.perf_counter()
            writer.fill({"shard": nbytes, "tail": 1000, "extras@step": 777})
            fills.append(time.perf_counter() - started)
            assert member.wait(generation) == "committed"
            seconds.append(time.perf_counter() - started)
            if iteration == 2:  # both slots of both sides have been touched
                before = [running.nodes[n].status()["cpu_seconds"] for n in range(2)]
        after = [running.nodes[n].status()["cpu_seconds"] for n in range(2)]
        warm = seconds[3:]
        sent = len(warm) * nbytes / 1e9
        print(f"first two: {seconds[0]:.3f} s, {seconds[1]:.3f} s (memory touched first)")
        print(
            f"fill -> committed: median {statistics.median(warm):.3f} s,"
            f" best {min(warm):.3f} s, worst {max(warm):.3f} s"
            f" = {nbytes / 1e9 / statistics.median(warm):.2f} GB/s (median)"
        )
        print(f"fill() itself: median {statistics.median(fills) * 1e6:.0f} us")
        for name, a, b in zip(
            ("owner (seal, send)", "buddy (receive, verify)"), before, after, strict=True
        ):
            print(f"processor time, {name}: {(b - a) / sent:.2f} s/GB")
        started = time.perf_counter()
        xxhash.xxh3_64_intdigest(noise)
        print(f"xxh3_64 alone: {nbytes / 1e9 / (time.perf_counter() - started):.1f} GB/s")
        started = time.perf_counter()
        inventories = running.close(1)
        print(f"close and inventory, 3 nodes in turn: {time.perf_counter() - started:.3f} s")
        kept = Generation(1, ITERATIONS - 1)
        found = sources_from(inventories, kept, {0: layout}, first=1)
        seats = {0: Seat(2, 0, 0), 1: Seat(1, 0, 0)}
        record = running.record(2, Restore("memory", kept, sources=found), seats)
        fresh = Member(running.nodes[2], layout)
        fresh.client.register(layout, 1)
        started = time.perf_counter()
        running.open(record)
        print(f"adopt, 3 nodes in turn: {time.perf_counter() - started:.3f} s")
        parts = fresh.restore(record)
        elapsed = time.perf_counter() - started
        assert xxhash.xxh3_64_intdigest(parts.part("shard")) == xxhash.xxh3_64_intdigest(noise)
        print(f"restore on another node: {elapsed:.3f} s = {nbytes / 1e9 / elapsed:.2f} GB/s")
        parts.close()
        assert fresh.wait(kept) == "committed"
        print(f"re-protected after {time.perf_counter() - started:.3f} s")


if __name__ == "__main__":
    main()
