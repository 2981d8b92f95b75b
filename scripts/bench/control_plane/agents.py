"""Agents without a node: the coordinator's clients in one process, each with a real agent's link.

The node is simulated: its members start, register and restore at once, beat each second with news,
and its vault has the copies of the placement. A record is decoded once for all agents, as they
share a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.link.agent_link import CoordinatorLink
from deadpool_megatron.cluster.link.message_limits import is_reported
from deadpool_megatron.cluster.link.protocol import report_of
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout import records
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.preflight.host import read_facts
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing

_SHARD_BYTES = 1 << 30
_EXTRAS_BYTES = 1 << 16
_LINE_OF_MEGATRON = "iteration " + "x" * 350
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 600.0
_LONG_BYTES = 16 << 10
_FACTS = read_facts("127.0.0.1").to_dict()
_decode = framing.decode_body
_decode_long = lru_cache(4)(_decode)  # records, the same for all agents
#: bytes of all messages that the agents of this process have received
received = Counter[str]()


def _decode_once(body: bytes, limit_bytes: int) -> dict[str, Any]:
    received["bytes"] += len(body)
    return (_decode_long if len(body) > _LONG_BYTES else _decode)(body, limit_bytes)


framing.decode_body = _decode_once


class Cluster:
    """The agents and what they share. Used from one loop. ``at``: when the first and the last agent
    has received a message, by kind and number, on the wall clock; ``counts``: how many have."""

    def __init__(
        self, run: Path, secret: bytes, run_id: str, settings: Settings, size: tuple[int, int, int]
    ) -> None:
        nodes, spares, self.nproc = size
        self.run, self.secret, self.run_id, self.settings = run, secret, run_id, settings
        self.world_size = nodes * self.nproc
        self.iteration = self.beats = 0
        self.at: dict[tuple[str, int], tuple[float, float]] = {}
        self.counts = Counter[tuple[str, int]]()
        self.record: records.EpochRecord | None = None
        self.seats = records.SeatTable({})
        # For all vaults: a coordinator takes over without the nodes that refuse its connections.
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2 * (nodes + spares))
        self.agents = [Agent(self, node) for node in range(nodes + spares)]
        self._address: tuple[float, tuple[str, int] | None] = (0.0, None)
        self._newest: Mapping[str, Any] = {}
        self._inventories: dict[int, dict[str, Any]] = {}
        self._layouts: dict[int, records.RoleLayout] = {}

    def note(self, kind: str, number: int) -> None:
        """Note that an agent has received a message now."""
        now = time.time()
        self.at[kind, number] = self.at.get((kind, number), (now, now))[0], now
        self.counts[kind, number] += 1

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

    def take(self, values: Mapping[str, Any]) -> records.EpochRecord:
        """Return the record of a message."""
        if self.record is None or values is not self._newest:
            self._newest, self.record = values, records.EpochRecord.from_dict(values)
            self.seats, self._inventories = records.SeatTable(self.record.seats), {}
        return self.record

    def layout(self, role: int) -> records.RoleLayout:
        """Return a layout: tensor parallel on the node, data parallel across at most 64 nodes."""
        if role not in self._layouts:
            step = max(self.nproc, self.world_size // 64)
            peers = tuple(range(role % step, self.world_size, step))
            extras = [
                records.PartInfo(records.extras_part(name), _EXTRAS_BYTES, (role,))
                for name in records.BOUNDARIES
            ]
            parts = (records.PartInfo("optimizer", _SHARD_BYTES, (role,)), *extras)
            self._layouts[role] = records.RoleLayout(
                role, parts, peers, 2, f"layout of role {role:08d}"
            )
        return self._layouts[role]

    def prepare(self) -> None:
        """Make the inventories of all vaults: own roles and copies, two generations each. Real
        nodes do so in parallel."""
        record = self.record
        assert record is not None
        placement, held = CopyPlacement.of_record(record), dict[int, list[int]]()
        for role, seat in record.seats.items():
            for holder in (seat.node, *placement.buddies(role, self.layout(role).peers)):
                held.setdefault(holder, []).append(role)
        parts = frozenset({"optimizer", records.extras_part("step")})
        last = max(self.iteration, record.restore.generation.iteration, 1)
        kept = [records.Generation(record.epoch, last), records.Generation(record.epoch, last - 1)]
        for agent in self.agents:
            roles = held.get(agent.node, [])
            holdings = tuple(records.Holding(role, each, parts) for role in roles for each in kept)
            layouts = tuple(self.layout(role) for role in roles)
            inventory = records.Inventory(agent.node, record.epoch, holdings, layouts)
            self._inventories[agent.node] = inventory.to_dict()

    def inventory(self, node: int, epoch: int) -> dict[str, Any]:
        """Return the inventory of a node's vault when an epoch is closed; the epoch may be old, as
        an order may be repeated late."""
        if not self._inventories:
            self.prepare()
        inventory = {**self._inventories[node], "epoch": epoch}  # the record may be newer
        return {"t": "inventory", "epoch": epoch, "inventory": inventory}


class Agent:
    """One node. ``contact_at``: when the newest confirmed beat was sent, monotonic seconds."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self.node, self.contact_at = node, 0.0
        self._cluster = cluster
        self._incarnations: dict[int, int] = {}
        self.epoch = 0
        self._closed = 0
        self._registered: set[tuple[int, int]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        identity = (cluster.secret, cluster.run_id, cluster.settings)
        self.link = CoordinatorLink(
            *(cluster.address, *identity, self._join, self._took, self._noted_contact)
        )

    @property
    def in_touch(self) -> bool:
        """Return whether a recent beat was acknowledged."""
        age = time.monotonic() - self.contact_at
        return self.link.connected and age <= self.link.contact_seconds

    def start(self) -> None:
        """Connect, and keep in contact."""
        made = asyncio.create_task
        self._tasks = [made(self.link.run(_PATIENCE_SECONDS)), made(self._beat())]

    def kill(self) -> None:
        """End the node."""
        for task in self._tasks:
            task.cancel()
        self.link.close()

    def _noted_contact(self, sent_at: float, term: int) -> None:
        self.contact_at = sent_at

    def _join(self) -> dict[str, Any]:
        slots = {str(slot): incarnation for slot, incarnation in self._incarnations.items()}
        node = self.node
        return {
            "t": "join",
            "node": node,
            "boot": f"{os.getpid()}.{node}",
            "facts": _FACTS,
            "host": "127.0.0.1",
            "returns": False,
            "vault_port": self._cluster.listener.getsockname()[1],
            "domain": f"rack{node // 32}",
            "members": slots,
            "incarnations": slots,
            "found": None,
            "epoch": self.epoch,
            "told": self.epoch,
            "closed": self._closed,
            "restored": dict.fromkeys(slots, self.epoch),
            "memory_bytes": 100 * _SHARD_BYTES,
        }

    def _send(self, slot: int, message: dict[str, Any]) -> None:
        about = {"t": "member", "slot": slot, "incarnation": self._incarnations[slot]}
        self.link.send({**about, "m": message}, retain=True)

    def _took(self, message: Mapping[str, Any]) -> None:
        kind = message["t"]
        if kind == "welcome":
            self._cluster.note("welcome", int(message["term"]))
            if 0 < self.epoch <= int(message["closed"]):
                self._close(int(message["closed"]))
        elif kind == "start":
            for slot, incarnation in message["slots"].items():
                self._incarnations[int(slot)] = int(incarnation)
                self._send(int(slot), {"t": "hello", "pid": os.getpid()})
        elif kind == "record":
            self._take_record(message["record"])
        elif kind == "close":
            self._close(int(message["epoch"]))
        elif kind == "stop":
            self.kill()

    def _take_record(self, values: Mapping[str, Any]) -> None:
        record = self._cluster.take(values)
        self._cluster.note("record", record.epoch)
        self.epoch = record.epoch
        for slot, incarnation in self._incarnations.items():
            role = self._role(slot)
            if role is None:
                self._send(slot, {"t": "warm"})
                continue
            if (slot, incarnation) not in self._registered:
                self._registered.add((slot, incarnation))
                layout = self._cluster.layout(role).to_dict()
                self._send(slot, {"t": "registered", "layout": layout})
            restored = record.restore.generation.to_list()
            self._send(slot, {"t": "restored", "epoch": record.epoch, "generation": restored})

    def _role(self, slot: int) -> int | None:
        return self._cluster.seats.role_by_place.get((self.node, slot))

    def _close(self, epoch: int) -> None:
        self._closed = epoch
        self.link.send(self._cluster.inventory(self.node, epoch))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self.link.connected and self.link.beat_is_due:
                self.link.beat(self._news)
                self._cluster.beats += 1

    def _news(self) -> dict[str, Any]:
        """Return the part of members and vault in a beat."""
        cluster, first = self._cluster, self.node * self._cluster.nproc
        about = {"t": "beat", "section": "step", "progress": (number := cluster.iteration)}
        members = {
            str(slot): {
                **about,
                "incarnation": incarnation,
                "iteration": number,
                "waiting": ["data-parallel", "all_reduce", number * 12 + slot],
            }
            for slot, incarnation in self._incarnations.items()
        }
        roles = range(first, first + 2 * cluster.nproc)
        committed = {str(role): f"1:{number}@step" for role in roles}
        vault = {"committed": committed, "bytes": _SHARD_BYTES, "shipped": number}
        return {"members": members, "vault": vault} if members else {}

    def step(self, iteration: int) -> None:
        """Report a step, as one role of the run does, and its log line."""
        loss = {"loss": float(iteration).hex(), "samples": 1024, "skipped": False}
        self._event(Kind.STEP, 0, iteration, loss)
        self._event(Kind.LOG, 0, iteration, {"level": "info", "text": _LINE_OF_MEGATRON})

    def report_routine(self, iteration: int) -> None:
        """Report what is routine for each role in an iteration; in the worst case each role waits
        in each iteration."""
        for role in (role for slot in self._incarnations if (role := self._role(slot)) is not None):
            facts = {"lineage": self.epoch, "boundary": "step"}
            if is_reported(role, iteration, self._cluster.world_size):
                self._event(Kind.SEALED, role, iteration, {**facts, "parts": ["optimizer"]})
                ship = {"ship_seconds": 1.2, "window_seconds": 6.5}
                sent = {**facts, "released": False, "bytes": _SHARD_BYTES, **ship}
                self._event(Kind.COMMITTED, role, iteration, sent)
            waited = {"seconds": 0.012345678, "over": True, "lineage": self.epoch}
            self._event(Kind.GATE_WAIT, role, iteration, waited)

    def _event(self, kind: Kind, role: int | None, iteration: int, data: Mapping[str, Any]) -> None:
        event = Event(kind, self.epoch, self.node, role, iteration, data=data)
        self.link.send(report_of(event))
