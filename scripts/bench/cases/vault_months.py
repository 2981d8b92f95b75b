"""Does a vault stay as it is over months?

Two vaults, a role on each, and a spare's vault; no training. Small generations are committed one
after the other (--generations, 10^6 are months), with what happens to a run among them: an epoch is
closed and another opened from memory (after every --close generations), a dump is written
(--dump), a vault is killed and another adopts its slots (--kill, of either node in turns).

Samples are taken at intervals: own_cpu_seconds_per_generation of both vaults, resident memory,
descriptors, threads, files and bytes in /dev/shm. Each becomes a slope for a million generations
(slopes of the JSON), with its 95 % interval; each life of a vault has a level of its own. Flat is a
slope whose interval has 0 in it, or that would not matter in years.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common.figures import row, slope
from common.frame import Facts, at_least
from vaults.nodes import Node, layout_of, threads

from deadpool_megatron.layout.records import EpochRecord, Generation, Seat
from tests.vault import harness

MINUTES = 90
QUICK = ("--generations", "60", "--close", "20", "--dump", "25", "--kill", "30", "--samples", "6")
_NODES = 2
_BYTES = 4096


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    for name, default in {
        "generations": 10**6,
        "close": 5000,
        "dump": 20_000,
        "kill": 50_000,
    }.items():
        parser.add_argument(f"--{name}", type=at_least(2), default=default, metavar="N")
    parser.add_argument("--samples", type=at_least(4), default=200, metavar="N")


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Commit all generations."""
    samples: list[dict[str, Any]] = []
    with harness.cluster(base, _NODES + 1, kind=Node) as vaults:
        life = Life(vaults, base)
        spent, before = sum(threads(vaults).values()), 0
        for number in range(1, args.generations + 1):
            life.step()
            if number % args.close == 0:
                life.reopen()
            if number % args.dump == 0:
                life.dump()
            if number % args.kill == 0:
                life.kill(number // args.kill % _NODES)
                spent, before = sum(threads(vaults).values()), number
            if number % max(1, args.generations // args.samples) == 0 and number > before:
                now = sum(threads(vaults).values())
                cpu = (now - spent) / (number - before)
                samples.append(sample(vaults, number, cpu) | {"life": life.lives})
                spent, before = now, number
                print(f"{number} generations", file=sys.stderr, flush=True)
    names = [name for name in samples[0] if name not in ("at", "life")]
    lives = [each["life"] for each in samples]
    slopes = {
        name: slope([(each["at"] / 1e6, each[name]) for each in samples], lives) for name in names
    }
    for name, found in slopes.items():
        text = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        print(f"{name}, for a million generations: {text}", file=sys.stderr)
    values = {name: [each[name] for each in samples] for name in names}
    counts = {"closes": life.epoch - 1, "dumps": life.dumps, "kills": life.lives}
    curves = {name: [("vaults", [(each["at"], each[name]) for each in samples])] for name in names}
    rows = [row("vaults", values)]
    return {"rows": rows, "slopes": slopes, "samples": samples, "curves": curves, **counts}


def sample(vaults: harness.Cluster, number: int, cpu: float) -> dict[str, Any]:
    """Return what the vaults hold now."""
    pids = [Path(f"/proc/{node.process.pid}") for node in vaults.nodes[:_NODES]]
    files = [path for path in vaults.shm.rglob("*") if path.is_file()]
    return {
        "at": number,
        "own_cpu_seconds_per_generation": cpu,
        "rss_mb": sum(int((p / "statm").read_text().split()[1]) * 4096 / 1e6 for p in pids),
        "descriptors": sum(len(list((p / "fd").iterdir())) for p in pids),
        "threads": sum(len(list((p / "task").iterdir())) for p in pids),
        "shm_files": len(files),
        "shm_mb": sum(path.stat().st_blocks * 512 / 1e6 for path in files),
    }


class Life:
    """The members of both nodes, and what happens to them."""

    def __init__(self, vaults: harness.Cluster, base: Path) -> None:
        self.epoch, self.lives, self.dumps = 1, 0, 0
        self._vaults, self._base, self._iteration = vaults, base, -1
        self._layouts = {role: layout_of(role, _BYTES, range(_NODES)) for role in range(_NODES)}
        self._seats = {role: Seat(role, 0, 0) for role in range(_NODES)}
        self._record = vaults.record(1, seats=self._seats)
        vaults.open(self._record)
        self._members = [
            harness.Member(vaults.nodes[role], layout, 1) for role, layout in self._layouts.items()
        ]
        self.step()

    @property
    def _generation(self) -> Generation:
        return Generation(self.epoch, self._iteration)

    def step(self) -> None:
        """Commit the next generation of both roles."""
        self._iteration += 1
        for member in self._members:
            writer = member.client.begin(self._generation, self.epoch)
            writer.part("shard")[:8] = self._iteration.to_bytes(8)
            writer.fill({"shard": _BYTES, "extras@step": 777})
        for member in self._members:
            assert member.wait(self._generation) == "committed"

    def reopen(self) -> None:
        """Close the epoch, and open another from memory."""
        nodes = self._vaults.nodes
        for node in nodes:
            node.close_epoch(self.epoch)
        inventories = {node.number: node.inventory() for node in nodes}
        restore = harness.memory(inventories, self._generation, self._layouts)
        self.epoch += 1
        self._enter(self._vaults.record(self.epoch, restore, self._seats))
        for member in self._members:
            member.client.register(member.layout, self.epoch)
            parts = member.restore(self._record)
            assert int.from_bytes(parts.part("shard")[:8]) == self._iteration
            parts.close()

    def _enter(self, record: EpochRecord) -> None:
        self._record = record
        self._vaults.open(record)

    def dump(self) -> None:
        """Have both vaults write the newest generation to disk."""
        self.dumps += 1
        for node in self._vaults.nodes[:_NODES]:
            node.dump(self._base / "dump", self._generation, "step")

    def kill(self, number: int) -> None:
        """Kill a vault; another adopts its slots in the same epoch."""
        self.lives += 1
        node = self._vaults.nodes[number]
        node.kill()
        node.restart(self._record)
