"""Agents without a node: the coordinator's clients in one asyncio process, for scripts/bench.

Each speaks the protocol of a real agent over a real socket: greeting, join, numbered reports, beats
of all its members, answers to every order. What a node would compute is made up: members start,
register, restore at once, and a vault that holds what the placement says. A record is unpacked once
for all agents, as there is one process here and not thousands.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.link.record_delta import unpack
from deadpool_megatron.layout.deltas import apply
from deadpool_megatron.layout.inventories import pack_inventory
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import (
    BOUNDARIES,
    EpochRecord,
    Generation,
    Holding,
    Inventory,
    PartInfo,
    RoleLayout,
    extras_part,
)
from deadpool_megatron.layout.seats import SeatTable
from deadpool_megatron.preflight.host import read_facts
from deadpool_megatron.wire.auth import Handshake, address_of
from deadpool_megatron.wire.framing import FrameBuffer, encode
from deadpool_megatron.wire.records import Direction, Opener

_SHARD_BYTES = 1 << 30
_EXTRAS_BYTES = 1 << 16
_FACTS = read_facts("127.0.0.1").to_dict()
_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)


class Moments:
    """When the agents heard of something: first and last, by the wall clock."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int], list[float]] = {}

    def note(self, kind: str, number: int) -> None:
        """One agent has heard of it now."""
        self._times.setdefault((kind, number), []).append(time.time())

    def count(self, kind: str, number: int) -> int:
        """How many have."""
        return len(self._times.get((kind, number), ()))

    def last(self, kind: str, number: int) -> float:
        """When the last one did."""
        return max(self._times[kind, number])


class Cluster:
    """The agents and what they share. Used from one loop."""

    def __init__(self, run: Path, secret: bytes, run_id: str, size: tuple[int, int, int]) -> None:
        nodes, spares, self.nproc = size
        self.run, self.secret, self.run_id = run, secret, run_id
        self.world_size = nodes * self.nproc
        self.moments = Moments()
        self.iteration = 0
        self.beats = 0
        self.bytes_received = 0
        self.record: EpochRecord | None = None
        self.agents = [Agent(self, node) for node in range(nodes + spares)]
        self._unpacked: dict[str, EpochRecord] = {}
        self._seats: tuple[EpochRecord, SeatTable] | None = None
        self._held: dict[int, list[int]] = {}
        self._held_for = 0
        self._layouts: dict[int, RoleLayout] = {}

    def address(self) -> tuple[str, int] | None:
        """Of the present coordinator, as the run directory says."""
        try:
            found = json.loads((self.run / "coordinator.json").read_text())
        except (OSError, ValueError):
            return None
        return str(found["host"]), int(found["port"])

    def take(self, parts: Mapping[str, Any]) -> EpochRecord:
        """The record that a message means."""
        text = str(parts["change"])
        known = self._unpacked.get(text)
        if known is None:
            changed = unpack(text)
            known = apply(self.record if int(changed["base"]) else None, changed, {})
            self._unpacked = {text: known}
            self.record = known
        return known

    def seats(self, record: EpochRecord) -> SeatTable:
        """The seats of a record, by place."""
        if self._seats is None or self._seats[0] is not record:
            self._seats = (record, SeatTable(record.seats))
        return self._seats[1]

    def layout(self, role: int) -> RoleLayout:
        """Tensor parallel on the node, data parallel across 64 nodes or as many as there are."""
        if role not in self._layouts:
            step = max(self.nproc, self.world_size // 64)
            peers = tuple(range(role % step, self.world_size, step))
            extras = [PartInfo(extras_part(one), _EXTRAS_BYTES, (role,)) for one in BOUNDARIES]
            parts = (PartInfo("optimizer", _SHARD_BYTES, (role,)), *extras)
            self._layouts[role] = RoleLayout(role, parts, peers, 2, f"layout of role {role:08d}")
        return self._layouts[role]

    def inventory(self, node: int) -> Inventory:
        """What the vault of a node holds: own roles and copies, two generations of each."""
        record = self.record
        assert record is not None
        if self._held_for != record.epoch:
            placement = CopyPlacement.of_record(record)
            self._held, self._held_for = {}, record.epoch
            for role, seat in record.seats.items():
                for holder in (seat.node, *placement.buddies(role, self.layout(role).peers)):
                    self._held.setdefault(holder, []).append(role)
        last = max(self.iteration, record.restore.generation.iteration)
        generations = [Generation(record.epoch, last)]
        if last > 0:
            generations.append(Generation(record.epoch, last - 1))
        parts = frozenset({"optimizer", extras_part("step")})
        held = self._held.get(node, [])
        return Inventory(
            node,
            record.epoch,
            tuple(Holding(role, one, parts) for role in held for one in generations),
            tuple(self.layout(role) for role in held),
        )


class Agent(asyncio.Protocol):
    """One node. ``alive`` is False for a node that was killed."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self.node = node
        self.alive = True
        self.welcomed = False
        self._cluster = cluster
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = None
        self._sending: Direction | None = None
        self._opener: Opener | None = None
        self._frames = FrameBuffer()
        self._number = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self.acknowledged_step = 0
        self._steps: deque[tuple[int, int]] = deque()
        self._incarnations: dict[int, int] = {}
        self._said: dict[int, dict[str, dict[str, Any]]] = {}
        self._boot = ""
        self._ordered = 0
        self._term = 0
        self._told = 0
        self._closed = 0
        self._registered: set[tuple[int, int]] = set()
        self._beat_seconds = 0.1
        self._beating: asyncio.TimerHandle | None = None
        self._attempt = 0
        self._connecting: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Connect now, and again after each end of the connection."""
        self._connecting = asyncio.ensure_future(self._connect())

    def kill(self) -> None:
        """The end of the node."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    async def _connect(self) -> None:
        address = self._cluster.address()
        loop = asyncio.get_running_loop()
        try:
            if address is None:
                raise OSError("no coordinator yet")
            await loop.create_connection(lambda: self, *address)
        except OSError:
            self._again()

    def _again(self) -> None:
        if self.alive:
            pause = _PAUSES_SECONDS[min(self._attempt, len(_PAUSES_SECONDS) - 1)]
            self._attempt += 1
            asyncio.get_running_loop().call_later(pause * random.uniform(0.5, 1.0), self.start)

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._frames = FrameBuffer()
        self._sending, self._opener = None, None
        address = address_of(transport.get_extra_info("peername"))
        self._handshake = Handshake(self._cluster.secret, self._cluster.run_id, address)
        transport.write(encode(self._handshake.hello()))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self.welcomed = False
        if self._beating is not None:
            self._beating.cancel()
        self._again()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._cluster.bytes_received += len(data)
        for message in self._frames.feed(data if self._opener is None else self._opener.feed(data)):
            self._on_message(message)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data if self._sending is None else self._sending.seal(data))

    def _report(self, message: Mapping[str, Any]) -> None:
        self._number += 1
        data = encode({**message, "n": self._number})
        self._unacknowledged.append((self._number, data))
        if self.welcomed:
            self._write(data)

    def _say(self, slot: int, message: dict[str, Any]) -> None:
        self._said.setdefault(slot, {})[message["t"]] = message
        incarnation = self._incarnations[slot]
        self._report({"t": "member", "slot": slot, "incarnation": incarnation, "m": message})

    # What the coordinator says.

    def _on_message(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if "o" in message:
            if message["o"] <= self._ordered:
                return
            self._ordered = message["o"]
        if kind == "ack":
            self._acknowledge(int(message["n"]))
        elif kind == "challenge":
            assert self._handshake is not None
            self._write(encode(self._handshake.answer(message)))
            # The coordinator says nothing more before it has heard of this node.
            self._sending = self._handshake.direction("connect")
            self._opener = Opener(self._handshake.direction("accept"))
            self._write(encode(self._join()))
        elif kind == "welcome":
            self._welcome(message)
        elif kind == "start":
            for slot, incarnation in message["slots"].items():
                self._incarnations[int(slot)] = int(incarnation)
                self._say(int(slot), {"t": "hello", "pid": os.getpid()})
        elif kind == "record":
            self._record(message["record"])
        elif kind == "close":
            self._close(int(message["epoch"]))
        elif kind == "stop":
            self.kill()

    def _join(self) -> dict[str, Any]:
        return {
            "t": "join",
            "node": self.node,
            "boot": f"{os.getpid()}.{self.node}",
            "host": f"10.{self.node >> 16}.{self.node >> 8 & 255}.{self.node & 255}",
            "vault_port": 30000 + self.node * 7 % 20000,
            "nproc": self._cluster.nproc,
            "domain": f"rack{self.node // 32}",
            "hostname": f"host{self.node}",
            "members": {str(s): i for s, i in self._incarnations.items()},
            "incarnations": {str(s): i for s, i in self._incarnations.items()},
            "epoch": self._told,
            "told": self._told,
            "closed": self._closed,
            "restored": {str(slot): self._told for slot in self._incarnations},
            "term": self._term,
            "facts": _FACTS,
            "of": self._boot,
            "o": self._ordered,
        }

    def _welcome(self, message: Mapping[str, Any]) -> None:
        self.welcomed, self._attempt, self._term = True, 0, int(message["term"])
        self._beat_seconds = float(message["beat_seconds"])
        self._acknowledge(int(message["seen"]))
        for _, data in self._unacknowledged:
            self._write(data)
        if message["boot"] != self._boot:
            first, self._boot, self._ordered = not self._boot, str(message["boot"]), 0
            if not first:
                moment = random.uniform(0, float(message["repeat_seconds"]))
                asyncio.get_running_loop().call_later(moment, self._repeat)
        if 0 < self._told <= int(message["closed"]):
            self._close(int(message["closed"]))
        if message["record"] is not None:
            self._record(message["record"])
        self._cluster.moments.note("welcome " + self._boot, 0)
        loop = asyncio.get_running_loop()
        self._beating = loop.call_later(random.uniform(0, self._beat_seconds), self._beat)

    def _repeat(self) -> None:
        for slot, said in self._said.items():
            for one in list(said.values()):
                self._say(slot, one)

    def _acknowledge(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()
        while self._steps and self._steps[0][0] <= number:
            self.acknowledged_step = self._steps.popleft()[1]

    def _record(self, parts: Mapping[str, Any]) -> None:
        record = self._cluster.take(parts)
        self._cluster.moments.note("record", record.epoch)
        self._told = record.epoch
        for slot, incarnation in self._incarnations.items():
            role = self._role(record, slot)
            if role is None:
                self._say(slot, {"t": "warm"})
                continue
            if (slot, incarnation) not in self._registered:
                self._registered.add((slot, incarnation))
                layout = self._cluster.layout(role).to_dict()
                self._say(slot, {"t": "registered", "layout": layout})
            restored = record.restore.generation.to_list()
            self._say(slot, {"t": "restored", "epoch": record.epoch, "generation": restored})

    def _role(self, record: EpochRecord, slot: int) -> int | None:
        return self._cluster.seats(record).role_by_place.get((self.node, slot))

    def _close(self, epoch: int) -> None:
        self._cluster.moments.note("close", epoch)
        self._closed = epoch
        inventory = pack_inventory(self._cluster.inventory(self.node))
        self._report({"t": "inventory", "epoch": epoch, "inventory": inventory})

    def _beat(self) -> None:
        if self._transport is None:
            return
        cluster = self._cluster
        members = {
            str(slot): {
                "incarnation": incarnation,
                "t": "beat",
                "section": "step",
                "iteration": cluster.iteration,
                "waiting": ["data-parallel", "all_reduce", cluster.iteration * 12 + slot],
                "progress": cluster.beats,
            }
            for slot, incarnation in self._incarnations.items()
        }
        committed = {
            str(self.node * cluster.nproc + slot): f"1:{cluster.iteration}@step"
            for slot in range(2 * cluster.nproc)
        }
        vault = {"committed": committed, "bytes": _SHARD_BYTES, "shipped": cluster.iteration}
        sent = {"b": time.monotonic(), "o": self._ordered}
        self._write(encode({"t": "beat", "members": members, "vault": vault, **sent}))
        cluster.beats += 1
        loop = asyncio.get_running_loop()
        self._beating = loop.call_later(self._beat_seconds, self._beat)

    def step(self, iteration: int) -> None:
        """Report a step, as one role of the run does."""
        event = {"kind": "step", "epoch": self._told, "iteration": iteration, "node": self.node}
        loss = {"loss": float(iteration).hex()}
        clocks = {"wall_seconds": time.time(), "monotonic_seconds": time.monotonic()}
        self._report({"t": "event", "event": {**event, "data": loss, **clocks}})
        self._steps.append((self._number, iteration))


async def until(what: str, ready: Callable[[], Any], limit_seconds: float) -> None:
    """Wait for a condition. Raises TimeoutError that names it."""
    limit = time.monotonic() + limit_seconds
    while not ready():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {limit_seconds:g} s for {what}")
        await asyncio.sleep(0.02)
