"""How much of the processors do vaults take for a GB, in comparison with bare sockets?

Two nodes with roles, each other's buddies (with parity: a group for each pair of roles, its block
on the third node), and a spare; no training. A generation is written into all slots, the caches are
swept with other memory, then all roles declare it full at once: the vaults seal it, send, receive,
verify and commit it. In turns with each generation, the floor: the same bytes, both ways, through
bare sockets with the same two hashes (vaults/floor.py). At the end node 0 is lost, and its roles
are restored on the spare. Links: 0 is loopback, others are namespaces with a rate in Gbit/s (tbf;
root is needed).

  own_cpu_seconds_per_gb   of all vaults, for each GB sent; then its parts: local (seal, in the
                           thread that serves the member), ship (send), serve (receive and verify;
                           with parity also the block), other
  floor_cpu_seconds_per_gb of both ends of the floor
  cpu_over_floor           the ratio of the two, in pairs; the aim is 1.25
  first_cpu_seconds_per_gb of generations whose slots get their pages of memory
  gb_per_second, floor_gb_per_second       by the wall clock, both directions together
  restore_*                for each GB that the spare gets, new copies included; with parity it is
                           decoded

The JSON has, for each row, the processor time for a GB by thread and function, sampled (functions,
restore_functions). Sizes that do not fit into memory are left out, and named (left_out).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
import uuid
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
from common.figures import Row, row
from common.frame import BenchError, Facts, at_least
from vaults.nodes import SECONDS, Floor, Node, layout_of, link_of, threads

from deadpool_megatron.layout.planner import RestoreQuery, choose_restore
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, RoleLayout, Seat
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from deadpool_megatron.vault.vault_client import SlotWriter
from tests.vault import harness

MINUTES = 20
ROUNDS = 5
QUICK = ("--rounds", "1", "--roles", "1", "--mb", "2", "--gbit", "0", "--scheme", "buddy")
SCHEMES = ("buddy", "parity")
_PARITY = ProtectionPlan(SchemeNumbers(SchemeKind.PARITY, group=2))
#: longer than the time between two writes of vaults/watched.py
_WRITE_SECONDS = 0.3
#: generations whose slots are new
_COLD = 2
_SWEPT = np.ones(32 << 20)
_EXTRAS_BYTES = 777
_MAX_SHARE = 0.8  # share of the available memory
#: slots that hold a part, own and kept, and the two memories of the floor, for each role's bytes
_TIMES = 2 + 2 + 2


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    many, size = {"nargs": "*", "metavar": "N"}, at_least(1)
    rate = at_least(0, float)
    parser.add_argument("--roles", type=size, default=[1, 2, 8], help="of a node", **many)
    parser.add_argument("--mb", type=size, default=[100, 1000, 4000], help="of a role", **many)
    parser.add_argument("--gbit", type=rate, default=[0, 10, 25], help="of a link", **many)
    parser.add_argument("--scheme", choices=SCHEMES, nargs="*", default=SCHEMES)


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run all combinations."""
    facts: Facts = {"at": "MB of a role", "rows": [], "left_out": []}
    for gbit, roles, scheme, size in itertools.product(args.gbit, args.roles, args.scheme, args.mb):
        name = f"{scheme}, {roles} roles, {f'{gbit:g} Gbit/s' if gbit else 'loopback'}"
        if 2 * roles * size * 1e6 * _TIMES > _MAX_SHARE * available_bytes():
            facts["left_out"].append(f"{name}, {size} MB: too little memory")
            continue
        print(f"{name}, {size} MB", file=sys.stderr, flush=True)
        with link_of(gbit, 3, base) as link:
            (folder := base / uuid.uuid4().hex).mkdir()
            with harness.cluster(folder, 3, kind=partial(Node, link=link)) as vaults:
                trial = Trial(vaults, roles, int(size * 1e6), scheme == "parity")
                with Floor(link, vaults.shm, roles, trial.nbytes) as floor:
                    found = trial.run(args.rounds, floor)
        facts["rows"].append(found | {"row": name, "at": size})
    return facts


def available_bytes() -> int:
    """Return the memory that new processes may take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


class Trial:
    """Roles of two nodes, from their first generation to the loss of a node."""

    def __init__(self, vaults: harness.Cluster, roles: int, nbytes: int, parity: bool) -> None:
        self.nbytes = nbytes
        self._vaults, self._roles = vaults, roles
        self._more = {"protection": _PARITY} if parity else {}
        every = range(2 * roles)
        self._seats = {role: Seat(role // roles, role % roles, 0) for role in every}
        self._layouts: dict[int, RoleLayout] = {
            role: layout_of(role, nbytes, (role % roles, role % roles + roles)) for role in every
        }
        vaults.open(vaults.record(1, seats=self._seats, **self._more))
        self._members = [self._member(role, seat, 1) for role, seat in self._seats.items()]

    def _member(self, role: int, seat: Seat, epoch: int) -> harness.Member:
        node, layout = self._vaults.nodes[seat.node], self._layouts[role]
        return harness.Member(node, layout, epoch, slot=seat.local_rank)

    def run(self, rounds: int, floor: Floor) -> Row:
        """Commit generations, in turns with the floor, then restore the roles of node 0."""
        own, first = "own_cpu_seconds_per_gb", "first_cpu_seconds_per_gb"
        found: dict[str, list[float]] = {own: [], first: []}
        total = 2 * self._roles * self.nbytes / 1e9
        functions: Counter[str] = Counter()
        for number in range(_COLD + rounds):
            writers = self._write(Generation(1, number))
            places = by_function(self._vaults)
            spent, began = self._commit(writers, Generation(1, number))
            seconds, cpu = time.monotonic() - began, sum(spent.values()) / total
            if number < _COLD:
                found[first].append(cpu)
                continue
            began = time.monotonic()
            floor_cpu = floor.run() / total
            # Only now, as the vaults write it ten times a second.
            functions += by_function(self._vaults) - places
            now = {
                own: cpu,
                "floor_cpu_seconds_per_gb": floor_cpu,
                **{f"{part}_cpu_seconds_per_gb": s / total for part, s in parts_of(spent).items()},
                "gb_per_second": total / seconds,
                "floor_gb_per_second": total / (time.monotonic() - began),
            }
            for name, value in now.items():
                found.setdefault(name, []).append(value)
        pairs = zip(found[own], found["floor_cpu_seconds_per_gb"], strict=True)
        ratios = {"cpu_over_floor": [vaults / floor for vaults, floor in pairs]}
        places = by_function(self._vaults)
        found |= self._restore(Generation(1, _COLD + rounds - 1))
        restoring = by_function(self._vaults) - places
        return row("", found, ratios) | {
            "functions": shown(functions, rounds * total),
            "restore_functions": shown(restoring, total / 2),
        }

    def _write(self, generation: Generation) -> list[SlotWriter]:
        """Write a generation into the slots of all roles, which then leave the caches."""
        writers = [member.client.begin(generation, 1) for member in self._members]
        for writer in writers:
            np.frombuffer(writer.part("shard"), dtype=np.uint8)[:] = generation.iteration + 1
        assert _SWEPT.sum()
        return writers

    def _commit(
        self, writers: list[SlotWriter], generation: Generation
    ) -> tuple[Counter[str], float]:
        """Have the vaults commit a generation; return the time of their threads, and the begin."""
        before, began = threads(self._vaults), time.monotonic()
        for writer in writers:
            writer.fill({"shard": self.nbytes, "extras@step": _EXTRAS_BYTES})
        for member in self._members:
            if member.wait(generation, seconds=SECONDS) != "committed":
                raise BenchError(f"{generation} was not committed")
        return threads(self._vaults) - before, began

    def _restore(self, generation: Generation) -> dict[str, list[float]]:
        """Lose node 0; its roles restore on the spare, each byte checked by the vault."""
        vaults, living = self._vaults, self._vaults.nodes[1:]
        vaults.nodes[0].kill()
        for node in living:
            node.close_epoch(1)
        moved = range(self._roles)
        seats = self._seats | {role: Seat(2, role, 0) for role in moved}
        inventories = {node.number: node.inventory() for node in living}
        query = RestoreQuery(
            *(2, list(seats), inventories, seats, self._seats, {1: generation.iteration}),
            layouts=self._layouts,
        )
        restore = choose_restore(query)
        if not isinstance(restore, Restore) or restore.generation != generation:
            raise BenchError(f"nothing to restore: {restore}")
        record = vaults.record(2, restore, seats, (0,), **self._more)
        before, began = threads(vaults), time.monotonic()
        vaults.open(record)
        members = [self._member(role, seats[role], 2) for role in moved]
        restoring = [threading.Thread(target=check, args=(member, record)) for member in members]
        for thread in restoring:
            thread.start()
        for thread in restoring:
            thread.join()
        seconds, total = time.monotonic() - began, self._roles * self.nbytes / 1e9
        time.sleep(_WRITE_SECONDS)
        cpu = sum((threads(vaults) - before).values())
        return {
            "restore_cpu_seconds_per_gb": [cpu / total],
            "restore_gb_per_second": [total / seconds],
        }


def check(member: harness.Member, record: EpochRecord) -> None:
    """Restore, and look at the ends of the bytes; the vaults have checked all."""
    parts, wanted = member.restore(record), record.restore.generation.iteration + 1
    view = parts.part("shard")
    if not view[0] == view[-1] == wanted:
        raise BenchError("other bytes were restored")
    parts.close()


def shown(functions: Counter[str], gb: float) -> dict[str, float]:
    """Return the seconds of each function for a GB, the largest first."""
    return {place: s / gb for place, s in functions.most_common() if s / gb > 0.001}


def by_function(vaults: harness.Cluster) -> Counter[str]:
    """Return the processor time of all vaults so far by thread and function."""
    return sum((node.by_function() for node in vaults.nodes), Counter[str]())  # type: ignore


def parts_of(threads: Counter[str]) -> dict[str, float]:
    """Return the seconds of a vault's threads by their kind."""
    found = dict.fromkeys(("local", "ship", "serve", "other"), 0.0)
    for name, seconds in threads.items():
        kind = name.partition(": ")[2].partition("-")[0]
        found[kind if kind in found else "other"] += seconds
    return found
