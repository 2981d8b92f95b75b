"""Records on their way from the coordinator to the agents, each agent only what it lacks.

A record names all seats, all nodes and the sources of all roles; with 32,768 roles that is
megabytes, and after the loss of one node almost all of it is known on every other one. So a
*change* against the record that an agent has holds what the nodes have in common. As text it is
made once for all agents that have the same record, mostly all, and each gets with it the sources of
the roles that its node plays. A long text goes compressed: the first record of 4,096 nodes is sent
to all of them at the same time. Nothing on a node reads the sources of others; the journal keeps
the whole record.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.layout.records import EpochRecord, NodeAddress, Restore, Seat
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import MAXIMUM_FRAME_BYTES, WireError

_COMPRESSED_FROM_BYTES = 16 << 10


class RecordTeller:
    """One record, told to agents that have the one before, an older one or none.

    Not thread-safe. ``before``: the record that was told last.
    """

    def __init__(self, record: EpochRecord, before: EpochRecord | None) -> None:
        self.record = record
        self._bases = {} if before is None else {before.epoch: before}
        self._changes: dict[int, str] = {}
        self._roles: dict[int, list[int]] = {}
        for role, seat in record.seats.items():
            self._roles.setdefault(seat.node, []).append(role)

    def begin(self) -> None:
        """Make the change that most agents need, before it is needed."""
        self._change(max(self._bases, default=0))

    def parts(self, node: int, known_epoch: int) -> dict[str, Any] | None:
        """Return what a node lacks that has the record of ``known_epoch`` (0: none); None:
        nothing."""
        if known_epoch >= self.record.epoch:
            return None
        base = known_epoch if known_epoch in self._bases else 0
        sources = sources_of(self.record, self._roles.get(node, ()))
        return {"change": self._change(base), "sources": sources}

    def _change(self, base: int) -> str:
        if base not in self._changes:
            self._changes[base] = pack(change(self._bases.get(base), self.record))
        return self._changes[base]


class RecordKeeper:
    """An agent's side: the newest record it was told, completed by each change."""

    def __init__(self) -> None:
        self._record: EpochRecord | None = None

    @property
    def epoch(self) -> int:
        """Of the newest record, 0 before the first: what the coordinator must know."""
        return 0 if self._record is None else self._record.epoch

    def take(self, parts: Mapping[str, Any]) -> EpochRecord:
        """The record that the message means, or the one at hand if that is no older: it may have
        come on one connection after the agent had greeted on another. Raises WireError when it
        cannot be understood; after the next connect the agent is told everything it lacks.
        """
        try:
            changed = unpack(str(parts["change"]))
            if self._record is None or int(changed["epoch"]) > self._record.epoch:
                self._record = apply(self._record, changed, parts["sources"])
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            self._record = None
            raise WireError(f"a record that cannot be used: {error!r}") from error
        return self._record


def pack(values: Mapping[str, Any]) -> str:
    text = framing.dumps_in_parts(values)
    if len(text) < _COMPRESSED_FROM_BYTES:
        return text
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def unpack(text: str) -> dict[str, Any]:
    if not text.startswith("{"):
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAXIMUM_FRAME_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"unpacks to more than {MAXIMUM_FRAME_BYTES} bytes")
        text = data.decode()
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("a change is a JSON object")
    return values


class NotTheBase(ValueError):
    """The change is against a record that is not the one at hand."""


def sources_of(record: EpochRecord, roles: Iterable[int]) -> dict[str, Any]:
    """Returns the JSON form of the sources (and recipes) of these roles, as far as they have any:
    role -> [part -> places] or [part -> places, recipe].
    """
    restore = record.restore
    found: dict[str, Any] = {}
    for role in roles:
        if (parts := restore.sources.get(role)) is not None:
            entry: list[Any] = [
                {name: [source.to_list() for source in places] for name, places in parts.items()}
            ]
            if role in restore.recipes:
                entry.append(restore.recipes[role].to_dict())
            found[str(role)] = entry
    return found


def change(base: EpochRecord | None, record: EpochRecord) -> dict[str, Any]:
    """JSON form of what turns ``base`` (None: nothing is known) into ``record``, but sources."""
    seats = {} if base is None else base.seats
    nodes = {} if base is None else base.nodes
    restore = replace(record.restore, sources={}, recipes={}).to_dict()
    return {
        "epoch": record.epoch,
        "base": 0 if base is None else base.epoch,
        "seats": _to_blocks({r: s for r, s in record.seats.items() if seats.get(r) != s}),
        "unseated": sorted(role for role in seats if role not in record.seats),
        "nodes": {
            str(node): [address.host, address.vault_port, address.domain, int(address.spare)]
            for node, address in record.nodes.items()
            if nodes.get(node) != address
        },
        "lost": sorted(node for node in nodes if node not in record.nodes),
        "restore": restore,
        "replicas": record.replicas,
        "emitted_up_to": record.emitted_up_to,
        "fewer_copies": sorted(record.fewer_copies),
        "cause": record.cause,
        "protection": record.protection.to_dict(),
    }


def apply(
    base: EpochRecord | None, changed: Mapping[str, Any], sources: Mapping[str, Any]
) -> EpochRecord:
    """The new record. Raises NotTheBase, and KeyError, TypeError or ValueError for garbage."""
    wanted = int(changed["base"])
    if wanted != 0 and (base is None or base.epoch != wanted):
        have = "none" if base is None else f"that of epoch {base.epoch}"
        raise NotTheBase(f"a change of the record of epoch {wanted} came, known is {have}")
    seats = {} if wanted == 0 or base is None else dict(base.seats)
    nodes = {} if wanted == 0 or base is None else dict(base.nodes)
    for role in changed["unseated"]:
        del seats[int(role)]
    for node in changed["lost"]:
        del nodes[int(node)]
    seats.update(_from_blocks(changed["seats"]))
    for text, (host, port, domain, spare) in changed["nodes"].items():
        nodes[int(text)] = NodeAddress(str(host), int(port), str(domain), bool(spare))
    return EpochRecord(
        epoch=int(changed["epoch"]),
        seats=dict(sorted(seats.items())),
        nodes=dict(sorted(nodes.items())),
        restore=Restore.from_dict(
            {
                **changed["restore"],
                "sources": {role: entry[0] for role, entry in sources.items()},
                "recipes": {role: entry[1] for role, entry in sources.items() if len(entry) > 1},
            }
        ),
        replicas=int(changed["replicas"]),
        emitted_up_to=int(changed["emitted_up_to"]),
        fewer_copies=frozenset(changed["fewer_copies"]),
        cause=str(changed["cause"]),
        protection=ProtectionPlan.from_dict(changed["protection"]),
    )


def _to_blocks(seats: Mapping[int, Seat]) -> list[list[int]]:
    """[first role, count, node, first slot, incarnation] of roles that sit side by side."""
    blocks: list[list[int]] = []
    for role, seat in sorted(seats.items()):
        if blocks:
            first, count, node, slot, incarnation = blocks[-1]
            there = (first + count, node, slot + count, incarnation)
            if there == (role, seat.node, seat.slot, seat.incarnation):
                blocks[-1][1] += 1
                continue
        blocks.append([role, 1, seat.node, seat.slot, seat.incarnation])
    return blocks


def _from_blocks(blocks: Iterable[Iterable[int]]) -> dict[int, Seat]:
    return {
        first + step: Seat(node, slot + step, incarnation)
        for first, count, node, slot, incarnation in blocks
        for step in range(count)
    }
