#!/usr/bin/env python
"""How long R roles take to connect N groups each: one by one, side by side, and stock torch.

    .venv/bin/python scripts/bench/rebuild.py [--roles 4 16 64] [--groups 4 10 20 40]
        [--rounds N] [--delay SECONDS] [--out FILE]

A process for each role, forked; a round measures each side once, in turns, and takes as long as
its last role. Ours meet through the links (real sockets, real relays, without handshake), as in a
recovery. Stock is init_process_group and new_group on a TCPStore whose clients are connected
before. ``--delay`` lets each group of ours take that much longer, asleep, as communicators of NCCL
take a second or two: it stands for that, and is no measurement of NCCL.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.command import parser_of, run_bench
from store import Tree, connect, link_of

from deadpool_megatron.comms import Communicators, Limits
from deadpool_megatron.comms.gloo import GlooFabric
from deadpool_megatron.comms.in_flight.waiters import AT_ONCE
from deadpool_megatron.comms.store import EpochStore

_DEADLINE_SECONDS = 120.0
SIDES = {"one by one": "one-by-one", "side by side": "side-by-side", "stock": ""}


def groups_of(roles: int, count: int) -> list[list[int]]:
    """As many partitions of the roles as bring every role ``count`` groups beside WORLD: pairs,
    octets and rows in turn, neighbours or strided, as tensor, model and data parallelism have them.
    """
    every = list(range(roles))
    found: list[list[int]] = []
    sizes = [size for size in (2, 4, 8, roles) if size <= roles]
    for number in range(count):
        size = sizes[number % len(sizes)]
        if number // len(sizes) % 2:
            found += [every[first :: roles // size] for first in range(roles // size)]
        else:
            found += [every[first : first + size] for first in range(0, roles, size)]
    return found


def play_role(
    role: int,
    roles: int,
    links: socket.socket,
    orders: socket.socket,
    port: int,
    count: int,
    delay_seconds: float,
) -> None:
    """Connect all groups whenever told to; answer how long it took."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    link = link_of(role, links)
    client = connect(port)
    if delay_seconds:
        _slow_down(delay_seconds)
    while order := orders.recv(64).decode():
        side, _, epoch = order.rpartition(" ")
        if SIDES[side]:
            ours = Communicators(limits=Limits(_DEADLINE_SECONDS), rebuild=SIDES[side])
            ours.install()
            dist.init_process_group("gloo", rank=role, world_size=roles)
            for ranks in groups_of(roles, count):
                dist.new_group(ranks)
            store = EpochStore(link.store, int(epoch), _DEADLINE_SECONDS)
            before = time.monotonic()
            ours.attach(int(epoch), store, role, _DEADLINE_SECONDS)
            took = time.monotonic() - before
            dist.barrier()
            dist.destroy_process_group()
            ours.uninstall()
        else:
            before = time.monotonic()
            prefixed = dist.PrefixStore(epoch, client)
            dist.init_process_group("gloo", store=prefixed, rank=role, world_size=roles)
            for ranks in groups_of(roles, count):
                dist.new_group(ranks)
            dist.barrier()
            took = time.monotonic() - before
            dist.destroy_process_group()
        orders.send(json.dumps([took, 0.0]).encode())


def _slow_down(seconds: float) -> None:
    create = GlooFabric.create

    def slow(self: GlooFabric, *arguments: Any) -> Any:
        time.sleep(seconds)
        return create(self, *arguments)

    GlooFabric.create = slow  # type: ignore[method-assign]


def measure(roles: int, count: int, rounds: int, delay_seconds: float) -> dict[str, Any]:
    """Returns the figures of one size."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    sides = [side for side in SIDES if SIDES[side] or not delay_seconds]
    with Tree(roles, play_role, count, delay_seconds) as tree:
        epoch = 0
        for number in range(rounds + 1):
            for side in sides if number % 2 else sides[::-1]:
                epoch += 1
                took, _ = tree.all(f"{side} {epoch}")
                print(f"{roles} roles, {count + 1} groups, {side}: {took:.3f} s", file=sys.stderr)
                if number:  # in the first one everything is loaded and mapped
                    seconds[side].append(took)
    return {
        "roles": roles,
        "groups_of_a_role": count + 1,
        "delay_seconds": delay_seconds,
        "seconds": {
            side: {"median": statistics.median(all_of), "least": min(all_of), "all": all_of}
            for side, all_of in seconds.items()
            if all_of
        },
    }


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 5, "of all sides")
    parser.add_argument("--roles", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 10, 20, 40])
    parser.add_argument("--delay", type=float, default=0.0, help="seconds for each group of ours")
    args = parser.parse_args()

    def measured(_: Path) -> dict[str, Any]:
        sizes = [
            measure(roles, count, args.rounds, args.delay)
            for roles in args.roles
            for count in args.groups
        ]
        return {"at_once": AT_ONCE, "sizes": sizes}

    return run_bench("rebuild", args.out, measured)


if __name__ == "__main__":
    sys.exit(main())
