"""Agents without a node: the coordinator's clients in one asyncio process, for scripts/bench.

Each uses the protocol of a real agent over a real socket: handshake, join, numbered reports, beats
of all its members, answers to every order. The node is simulated: its members start, register and
restore at once, and its vault has the copies of the placement. A record is decoded once for all
agents (see connection), as they share a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from control_plane.connection import Wire
from control_plane.moments import Moments
from deadpool_megatron.cluster.link.message_limits import RateLimiter, contact_seconds, is_reported
from deadpool_megatron.cluster.link.protocol import report_of
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import (
    BOUNDARIES,
    EpochRecord,
    Generation,
    Holding,
    Inventory,
    PartInfo,
    RoleLayout,
    SeatTable,
    extras_part,
)
from deadpool_megatron.preflight.host import read_facts
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.framing import encode, frame

_SHARD_BYTES = 1 << 30
_EXTRAS_BYTES = 1 << 16
_LINE_OF_MEGATRON = "iteration " + "x" * 350
# Placeholders in a prepared inventory: the newest iteration, its predecessor, the closed epoch.
_LAST, _BEFORE, _CLOSED = "999999937", "999999929", "999999893"
_LOOK_SECONDS = 0.05
_NEWS_SECONDS = 1.0  # as a real agent whose members always have news
_MEMORY_BYTES = 100 * _SHARD_BYTES
_FACTS = read_facts("127.0.0.1").to_dict()
_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)


class Cluster:
    """The agents and what they share. Used from one loop."""

    def __init__(
        self, run: Path, secret: bytes, run_id: str, settings: Settings, size: tuple[int, int, int]
    ) -> None:
        nodes, spares, self.nproc = size
        self.run, self.secret, self.run_id, self.settings = run, secret, run_id, settings
        self.world_size = nodes * self.nproc
        self.moments = Moments()
        self.iteration = 0
        self.beats = 0
        self.second_connections = 0
        self.term = 0  # the newest among the coordinators that accepted an agent
        self.record: EpochRecord | None = None
        self.seats = SeatTable({})
        self.agents = [Agent(self, node) for node in range(nodes + spares)]
        self._address: tuple[float, tuple[str, int] | None] = (0.0, None)
        self._newest: Mapping[str, Any] = {}
        self._inventories: dict[int, str] = {}
        self._held: dict[int, list[int]] = {}
        self._layouts: dict[int, RoleLayout] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def received_bytes(self) -> int:
        """The bytes that all agents have received so far."""
        return sum(agent.received_bytes for agent in self.agents)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine concurrently."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def address(self) -> tuple[str, int] | None:
        """Return the address of the current coordinator, which is read now and then for all."""
        looked_at, known = self._address
        if time.monotonic() - looked_at > _LOOK_SECONDS:
            try:
                found = json.loads((self.run / "coordinator.json").read_text())
                known = str(found["host"]), int(found["port"])
            except (OSError, ValueError):
                known = None
            self._address = time.monotonic(), known
        return known

    def take(self, values: Mapping[str, Any]) -> EpochRecord:
        """Return the record of a message."""
        if self.record is None or values is not self._newest:
            self._newest, self.record = values, EpochRecord.from_dict(values)
            self.seats, self._inventories = SeatTable(self.record.seats), {}
        return self.record

    def layout(self, role: int) -> RoleLayout:
        """Return a layout: tensor parallel on the node, data parallel across at most 64 nodes."""
        if role not in self._layouts:
            step = max(self.nproc, self.world_size // 64)
            peers = tuple(range(role % step, self.world_size, step))
            extras = [PartInfo(extras_part(name), _EXTRAS_BYTES, (role,)) for name in BOUNDARIES]
            parts = (PartInfo("optimizer", _SHARD_BYTES, (role,)), *extras)
            self._layouts[role] = RoleLayout(role, parts, peers, 2, f"layout of role {role:08d}")
        return self._layouts[role]

    async def prepare(self) -> None:
        """Prepare all inventories; real nodes would do so in parallel."""
        for agent in self.agents:
            self._inventory(agent.node)
            await asyncio.sleep(0)

    def inventory(self, node: int, epoch: int) -> str:
        """Return the inventory of a node's vault as JSON when an epoch is closed: own roles and
        copies, two generations each. The epoch may be old: an order may be repeated late.
        """
        assert self.record is not None
        last = max(self.iteration, self.record.restore.generation.iteration, 1)
        text = self._inventory(node).replace(_CLOSED, str(epoch))
        return text.replace(_LAST, str(last)).replace(_BEFORE, str(last - 1))

    def _inventory(self, node: int) -> str:
        record = self.record
        assert record is not None
        if not self._inventories:
            placement = CopyPlacement.of_record(record)
            self._held = {}
            for role, seat in record.seats.items():
                for holder in (seat.node, *placement.buddies(role, self.layout(role).peers)):
                    self._held.setdefault(holder, []).append(role)
        if node not in self._inventories:
            held = self._held.get(node, [])
            parts = frozenset({"optimizer", extras_part("step")})
            generations = [Generation(record.epoch, int(text)) for text in (_LAST, _BEFORE)]
            inventory = Inventory(
                node,
                int(_CLOSED),
                tuple(Holding(role, kept, parts) for role in held for kept in generations),
                tuple(self.layout(role) for role in held),
            )
            self._inventories[node] = json.dumps(inventory.to_dict(), separators=(",", ":"))
        return self._inventories[node]


class Agent:
    """One node. ``alive`` is False for a killed node. Like a real agent it opens another connection
    when the first has been silent for too long.
    """

    def __init__(self, cluster: Cluster, node: int) -> None:
        self.node = node
        self.alive = True
        self.received_bytes = 0
        self._cluster = cluster
        self._wire: Wire | None = None  # on which the newest welcome came
        self._fresh: Wire | None = None  # on its way to a welcome
        self._number = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self.acknowledged_step = 0
        self._steps: deque[tuple[int, int]] = deque()
        self._incarnations: dict[int, int] = {}
        self._sent: dict[int, dict[str, dict[str, Any]]] = {}
        self._boot = ""
        self._ordered = 0
        self._term = 0
        self._reported_epoch = 0
        self._closed = 0
        self._registered: set[tuple[int, int]] = set()
        self.beat_seconds = 0.1
        self._last_seen = 0.0
        self._beat_text = (-1, "")
        self._news_timer = RateLimiter(_NEWS_SECONDS)
        self._attempt = 0
        self._greetings = 0
        self._beating = False

    @property
    def in_touch(self) -> bool:
        """Return whether a recent beat was acknowledged."""
        limit = contact_seconds(self.beat_seconds, self._cluster.settings)
        return self._wire is not None and time.monotonic() - self._last_seen <= limit

    def start(self) -> None:
        """Connect now, and again after each end of the connection; one attempt at a time."""
        if self.alive and self._fresh is None and not self.in_touch:
            self._fresh = Wire(self, self._cluster.secret, self._cluster.run_id)
            self._cluster.spawn(self._connect(self._fresh))

    def kill(self) -> None:
        """End the node."""
        self.alive = False
        for wire in (self._wire, self._fresh):
            if wire is not None:
                wire.abort()

    async def _connect(self, wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        try:
            if (address := self._cluster.address()) is None:
                raise OSError("no coordinator yet")
            await loop.create_connection(lambda: wire, *address)
        except OSError:
            self.ended(wire)

    def ended(self, wire: Wire) -> None:
        """See Agent."""
        if wire is self._fresh:
            self._fresh = None
        elif wire is self._wire:
            self._wire = None
        else:
            return
        if self.alive and self._wire is None and self._fresh is None:
            pause = _PAUSES_SECONDS[min(self._attempt, len(_PAUSES_SECONDS) - 1)]
            self._attempt += 1
            asyncio.get_running_loop().call_later(pause * random.uniform(0.5, 1.0), self.start)

    def _report(self, message: Mapping[str, Any]) -> None:
        self._report_frame(lambda number: encode({**message, "n": number}))

    def _report_frame(self, frame: Callable[[int], bytes]) -> None:
        self._number += 1
        data = frame(self._number)
        self._unacknowledged.append((self._number, data))
        if self._wire is not None:
            self._wire.write(data)

    def _send(self, slot: int, message: dict[str, Any]) -> None:
        self._sent.setdefault(slot, {})[message["t"]] = message
        incarnation = self._incarnations[slot]
        self._report({"t": "member", "slot": slot, "incarnation": incarnation, "m": message})

    # Messages of the coordinator.

    def took(self, wire: Wire, message: dict[str, Any]) -> None:
        """See Agent."""
        kind = message["t"]
        if kind == "welcome" and wire is self._fresh:
            self._welcome(wire, message)
        if wire is not self._wire:
            return  # from the old connection, or a refusal
        if "o" in message:
            if message["o"] <= self._ordered:
                return
            self._ordered = message["o"]
        if kind == "ack":
            self._last_seen = float(message["beat"])
            self._acknowledge(int(message["n"]))
        elif kind == "start":
            for slot, incarnation in message["slots"].items():
                self._incarnations[int(slot)] = int(incarnation)
                self._send(int(slot), {"t": "hello", "pid": os.getpid()})
        elif kind == "record":
            self._record(message["record"])
        elif kind == "close":
            self._close(int(message["epoch"]))
        elif kind == "stop":
            self.kill()

    def join(self) -> dict[str, Any]:
        """See Agent."""
        self._greetings += 1
        return {
            "t": "join",
            "greeting": self._greetings,
            "node": self.node,
            "boot": f"{os.getpid()}.{self.node}",
            "host": f"10.{self.node >> 16}.{self.node >> 8 & 255}.{self.node & 255}",
            "vault_port": 30000 + self.node * 7 % 20000,
            "domain": f"rack{self.node // 32}",
            "members": {str(s): i for s, i in self._incarnations.items()},
            "incarnations": {str(s): i for s, i in self._incarnations.items()},
            "epoch": self._reported_epoch,
            "told": self._reported_epoch,
            "closed": self._closed,
            "restored": {str(slot): self._reported_epoch for slot in self._incarnations},
            "memory_bytes": _MEMORY_BYTES,
            "term": self._term,
            "facts": _FACTS,
            "of": self._boot,
            "o": self._ordered,
        }

    def _welcome(self, wire: Wire, message: Mapping[str, Any]) -> None:
        before, self._wire, self._fresh = self._wire, wire, None
        if before is not None:
            self._cluster.second_connections += 1
            before.abort()
        self._attempt, self._term = 0, int(message["term"])
        self._last_seen = time.monotonic()
        self.beat_seconds = float(message["beat_seconds"])
        self._acknowledge(int(message["seen"]))
        for _, data in self._unacknowledged:
            wire.write(data)
        if message["boot"] != self._boot:
            first, self._boot, self._ordered = not self._boot, str(message["boot"]), 0
            if not first:
                moment = random.uniform(0, float(message["repeat_seconds"]))
                asyncio.get_running_loop().call_later(moment, self._repeat)
        if 0 < self._reported_epoch <= int(message["closed"]):
            self._close(int(message["closed"]))
        self._cluster.term = max(self._cluster.term, self._term)
        self._cluster.moments.note("welcome", self._term)
        if not self._beating:
            self._beating = True
            loop = asyncio.get_running_loop()
            loop.call_later(random.uniform(0, self.beat_seconds), self._beat)

    def _repeat(self) -> None:
        for slot, messages in self._sent.items():
            for message in list(messages.values()):
                self._send(slot, message)

    def _acknowledge(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()
        while self._steps and self._steps[0][0] <= number:
            self.acknowledged_step = self._steps.popleft()[1]

    def _record(self, values: Mapping[str, Any]) -> None:
        record = self._cluster.take(values)
        self._cluster.moments.note("record", record.epoch)
        self._reported_epoch = record.epoch
        for slot, incarnation in self._incarnations.items():
            role = self.role(slot)
            if role is None:
                self._send(slot, {"t": "warm"})
                continue
            if (slot, incarnation) not in self._registered:
                self._registered.add((slot, incarnation))
                layout = self._cluster.layout(role).to_dict()
                self._send(slot, {"t": "registered", "layout": layout})
            restored = record.restore.generation.to_list()
            self._send(slot, {"t": "restored", "epoch": record.epoch, "generation": restored})

    def role(self, slot: int) -> int | None:
        """Return the role of its member in this slot, by the newest record."""
        return self._cluster.seats.role_by_place.get((self.node, slot))

    def _close(self, epoch: int) -> None:
        self._cluster.moments.note("close", epoch)
        self._closed = epoch
        inventory = self._cluster.inventory(self.node, epoch)
        start = f'{{"t":"inventory","epoch":{epoch},"inventory":{inventory}'
        self._report_frame(lambda number: frame(f'{start},"n":{number}}}'))

    def _beat(self) -> None:
        if not self.alive:
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self.beat_seconds, self._beat)
        cluster, now = self._cluster, time.monotonic()
        if self._wire is None:
            return
        self.start()
        sign, news = f'"b":{now},"o":{self._ordered},"t":"beat"', ""
        if self._news_timer.is_due(now):
            news = f",{self._beat_of(cluster.iteration)}"
        self._wire.write(frame(f"{{{sign}{news}}}"))
        cluster.beats += 1

    def _beat_of(self, iteration: int) -> str:
        """Return the part of members and vault in a beat; encoded once for each iteration."""
        if self._beat_text[0] == iteration:
            return self._beat_text[1]
        members = {
            str(slot): {
                "incarnation": incarnation,
                "t": "beat",
                "section": "step",
                "iteration": iteration,
                "waiting": ["data-parallel", "all_reduce", iteration * 12 + slot],
                "progress": iteration,
            }
            for slot, incarnation in self._incarnations.items()
        }
        nproc = self._cluster.nproc
        committed = {
            str(self.node * nproc + slot): f"1:{iteration}@step" for slot in range(2 * nproc)
        }
        vault = {"committed": committed, "bytes": _SHARD_BYTES, "shipped": iteration}
        text = json.dumps({"members": members, "vault": vault}, separators=(",", ":"))[1:-1]
        if self._incarnations:
            self._beat_text = iteration, text
        return text

    def step(self, iteration: int) -> None:
        """Report a step, as one role of the run does, and its log line."""
        loss = {"loss": float(iteration).hex(), "samples": 1024, "skipped": False}
        self._event(Kind.STEP, 0, iteration, loss)
        self._steps.append((self._number, iteration))
        self._event(Kind.LOG, 0, iteration, {"level": "info", "text": _LINE_OF_MEGATRON})

    def report_routine(self, iteration: int) -> None:
        """Report what is routine for each role in an iteration."""
        world_size = self._cluster.world_size
        for slot in self._incarnations:
            role = self.role(slot)
            if role is None:
                continue
            facts = {"lineage": self._reported_epoch, "boundary": "step"}
            if is_reported(role, iteration, world_size):
                self._event(Kind.SEALED, role, iteration, {**facts, "parts": ["optimizer"]})
                ship = {"ship_seconds": 1.2, "window_seconds": 6.5}
                sent = {**facts, "released": False, "bytes": _SHARD_BYTES, **ship}
                self._event(Kind.COMMITTED, role, iteration, sent)
            # The worst case: each role waits in each iteration.
            waited = {"seconds": 0.012345678, "over": True, "lineage": self._reported_epoch}
            self._event(Kind.GATE_WAIT, role, iteration, waited)

    def _event(self, kind: Kind, role: int | None, iteration: int, data: Mapping[str, Any]) -> None:
        event = Event(kind, self._reported_epoch, self.node, role, iteration, data=data)
        self._report(report_of(event))
