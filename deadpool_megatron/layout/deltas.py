"""What an agent is told of a record: only what differs from the record it has. Pure.

A record names all seats, all nodes and the sources of all roles; with 32,768 roles that is
megabytes, and after the loss of one node almost all of it is known on every other one. So a
*change* holds what the nodes have in common, is made once for each record that agents have
(mostly one), and each node gets with it the sources of the roles it plays itself. Nothing on a node
reads the sources of others; the journal keeps the whole record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.layout.records import EpochRecord, NodeAddress, Restore, Seat, Source
from deadpool_megatron.layout.schemes import ProtectionPlan

Sources = Mapping[int, Mapping[str, tuple[Source, ...]]]


class NotTheBase(ValueError):
    """The change is against a record that is not the one at hand."""


def for_node(record: EpochRecord, node: int) -> EpochRecord:
    """The record as this node needs it: with the sources of the roles it plays only."""
    mine = {role for role, seat in record.seats.items() if seat.node == node}
    restore = replace(
        record.restore,
        sources={r: found for r, found in record.restore.sources.items() if r in mine},
        recipes={r: recipe for r, recipe in record.restore.recipes.items() if r in mine},
    )
    return replace(record, restore=restore)


def sources_by_node(record: EpochRecord) -> dict[int, dict[str, Any]]:
    """Node -> JSON form of the sources (and recipes) of its roles; nodes without any are missing.

    One entry per role: [part -> places] or [part -> places, recipe].
    """
    recipes = record.restore.recipes
    found: dict[int, dict[str, Any]] = {}
    for role, parts in record.restore.sources.items():
        if role in record.seats:
            entry: list[Any] = [
                {name: [source.to_list() for source in places] for name, places in parts.items()}
            ]
            if role in recipes:
                entry.append(recipes[role].to_dict())
            found.setdefault(record.seats[role].node, {})[str(role)] = entry
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
