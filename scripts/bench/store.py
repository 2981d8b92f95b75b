#!/usr/bin/env python
"""How long the gloo groups of R roles take to meet: the store over the links, beside torch's.

    .venv/bin/python scripts/bench/store.py [--roles 8 16 64] [--rounds N] [--out FILE]

One process tree on this machine: a process for each role, one for each agent (up to eight roles),
one for the coordinator's store, one that serves a TCPStore. All roles attach the groups of a
Megatron layout again and again, in turns through either store; an epoch takes as long as its last
role. The links are real sockets with the real relays, without handshake; the client of the
TCPStore is connected before (how long that takes in the crowd is given apart).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.command import parser_of, run_bench
from common.machine import cpu_seconds_of

from deadpool_megatron.cluster.agent.members import FramePipe
from deadpool_megatron.cluster.link.member_link import Handlers, MemberLink
from deadpool_megatron.cluster.link.rendezvous import CoordinatorStore, StoreRelay
from deadpool_megatron.comms import Communicators, Limits
from deadpool_megatron.comms.store import EpochStore
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing

_DEADLINE_SECONDS = 120.0
_ROLES_PER_AGENT = 8
SIDES = ("links", "TCPStore")


def groups_of(roles: int) -> list[list[int]]:
    """Tensor pairs, model-parallel octets, data-parallel rows, twice each: as Megatron makes a
    group more than once for the same ranks.
    """
    every = list(range(roles))
    pairs = [every[i : i + 2] for i in range(0, roles, 2)]
    octets = [every[i : i + 8] for i in range(0, roles, 8)]
    rows = [every[i::8] for i in range(8)] if roles > 8 else []
    halves = [every[i::2] for i in range(2)]
    return 2 * (pairs + octets + rows + halves)


def link_of(role: int, links: socket.socket) -> MemberLink:
    """Returns the started link of a role to its agent."""
    seat = Seat(role // _ROLES_PER_AGENT, role % _ROLES_PER_AGENT, 0)
    link = MemberLink(links, seat, "", Settings())
    link.start(
        Handlers(
            on_close=lambda epoch, cause: None,
            on_pause=lambda iteration: None,
            status=lambda: {"section": "bench", "iteration": 0, "waiting": None, "progress": 0},
        )
    )
    return link


def connect(port: int) -> Any:
    """Returns a client of the TCPStore."""
    limit = timedelta(seconds=_DEADLINE_SECONDS)
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]


def play_role(
    role: int, roles: int, links: socket.socket, orders: socket.socket, port: int
) -> None:
    """Attach whenever told to, through the store that is named; answer how long it took."""
    torch.set_num_threads(1)
    link = link_of(role, links)
    communicators = Communicators(limits=Limits(_DEADLINE_SECONDS))
    communicators.install()
    dist.init_process_group("gloo", rank=role, world_size=roles)
    for ranks in groups_of(roles):
        dist.new_group(ranks)
    client: Any = None
    while order := orders.recv(64).decode():
        side, _, number = order.partition(" ")
        before, used = time.monotonic(), time.process_time()
        if side == "connect":
            client = connect(port)
        else:
            epoch = int(number)
            ours = EpochStore(link.store, epoch, _DEADLINE_SECONDS)
            store = client if side == "TCPStore" else ours
            communicators.attach(epoch, store, role, _DEADLINE_SECONDS)
        answer = [time.monotonic() - before, time.process_time() - used]
        orders.send(json.dumps(answer).encode())


def play_agent(members: list[socket.socket], coordinator: int) -> None:
    """Carry between members and coordinator."""
    asyncio.run(_relay(members, coordinator))


async def _relay(members: list[socket.socket], coordinator: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", coordinator)
    relay = StoreRelay(lambda message: writer.write(framing.encode(message)))

    def heard(number: int, message: dict[str, Any]) -> None:
        if message["t"] == "store":
            relay.enter(max(relay.epoch, message["epoch"]))
            relay.from_member(pipes[number], message)

    def listen(number: int, connection: socket.socket) -> FramePipe:
        return FramePipe(connection, lambda message: heard(number, message), lambda why: None)

    pipes = [listen(number, connection) for number, connection in enumerate(members)]
    while True:
        relay.from_coordinator(await framing.read_frame(reader))


def play_coordinator(listener: socket.socket) -> None:
    """Serve the agents."""
    asyncio.run(_coordinate(listener))


async def _coordinate(listener: socket.socket) -> None:
    writers: list[asyncio.StreamWriter] = []
    newest = 0
    store = CoordinatorStore(lambda node, frame: writers[node].write(frame), lambda: newest)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal newest
        writers.append(writer)
        node = len(writers) - 1
        frames = framing.FrameBuffer()
        while piece := await reader.read(1 << 18):
            for message in frames.feed(piece):
                newest = max(newest, message["epoch"])
                store.heard(node, message)

    server = await asyncio.start_server(serve, sock=listener)
    await server.serve_forever()


def play_tcp_store(told: int) -> None:
    """Serve a TCPStore."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    os.write(told, f"{store.port}\n".encode())
    signal.pause()


class Tree:
    """The processes of one size; a context manager that ends them.

    A role is ``play(role, roles, link, orders, port of the TCPStore, *arguments)``.
    """

    def __init__(self, roles: int, play: Callable[..., None] = play_role, *arguments: Any) -> None:
        self.roles = roles
        self._play = play
        self._arguments = arguments
        self.pids: dict[str, list[int]] = {}
        self.orders: list[socket.socket] = []

    def __enter__(self) -> Tree:
        read, told = os.pipe()
        self._fork("TCPStore", play_tcp_store, told)
        port = int(os.read(read, 16))
        listener = socket.create_server(("127.0.0.1", 0))
        self._fork("coordinator", play_coordinator, listener)
        for first in range(0, self.roles, _ROLES_PER_AGENT):
            ends = []
            for role in range(first, min(first + _ROLES_PER_AGENT, self.roles)):
                ours, theirs = socket.socketpair()
                orders, told_role = socket.socketpair()
                role_of = (role, self.roles, theirs, told_role, port)
                self._fork("role", self._play, *role_of, *self._arguments)
                theirs.close()
                told_role.close()
                ends.append(ours)
                self.orders.append(orders)
            self._fork("agent", play_agent, ends, listener.getsockname()[1])
            for end in ends:
                end.close()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [pid for pids in self.pids.values() for pid in pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def all(self, order: str) -> tuple[float, float]:
        """Give an order to all roles; returns the longest time that one took, and the processor
        seconds of all roles together.
        """
        for connection in self.orders:
            connection.send(order.encode())
        answers = []
        for role, connection in enumerate(self.orders):
            connection.settimeout(_DEADLINE_SECONDS)
            answer = connection.recv(256)
            if not answer:
                raise RuntimeError(f"role {role} ended at {order!r}")
            answers.append(json.loads(answer))
        return max(wall for wall, _ in answers), sum(used for _, used in answers)

    def processor_seconds(self, kind: str) -> float:
        """Used so far by all processes of a kind."""
        return sum(cpu_seconds_of(Path(f"/proc/{pid}")) for pid in self.pids[kind])

    def _fork(self, kind: str, function: Callable[..., None], *arguments: Any) -> None:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                gc.freeze()
                for connection in self.orders:
                    connection.close()
                function(*arguments)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        self.pids.setdefault(kind, []).append(pid)


def measure(roles: int, epochs: int) -> dict[str, Any]:
    """Returns the figures of one size."""
    walls: dict[str, list[float]] = {side: [] for side in SIDES}
    used: dict[str, list[float]] = {side: [] for side in SIDES}
    served = {"links": ("agent", "coordinator"), "TCPStore": ("TCPStore",)}
    serving: dict[str, float] = dict.fromkeys(SIDES, 0.0)
    with Tree(roles) as tree:
        connect, _ = tree.all("connect")
        tree.all("links 1")  # everything is loaded and mapped
        for number in range(epochs):
            for place, side in enumerate(SIDES if number % 2 else SIDES[::-1]):
                before = sum(tree.processor_seconds(kind) for kind in served[side])
                wall, processor = tree.all(f"{side} {2 + 2 * number + place}")
                walls[side].append(wall)
                used[side].append(processor)
                after = sum(tree.processor_seconds(kind) for kind in served[side])
                serving[side] += after - before
                print(f"{roles} roles, {side}: {wall:.3f} s", file=sys.stderr)
    return {
        "groups_of_all": len(groups_of(roles)) + 1,
        "groups_of_a_role": sum(0 in ranks for ranks in groups_of(roles)) + 1,
        "tcp_connect_seconds": connect,
        "attach_seconds": {
            side: {
                "median": statistics.median(walls[side]),
                "least": min(walls[side]),
                "most": max(walls[side]),
                "all": walls[side],
            }
            for side in SIDES
        },
        "processor_seconds_of_roles": {side: statistics.median(used[side]) for side in SIDES},
        "processor_seconds_of_servers": {side: serving[side] / epochs for side in SIDES},
    }


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 7, "epochs")
    parser.add_argument("--roles", type=int, nargs="+", default=[8, 16, 64])
    args = parser.parse_args()

    def measured(_: Path) -> dict[str, Any]:
        return {"sizes": {str(roles): measure(roles, args.rounds) for roles in args.roles}}

    return run_bench("store", args.out, measured)


if __name__ == "__main__":
    sys.exit(main())
