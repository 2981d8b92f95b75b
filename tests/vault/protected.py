"""Roles whose first generation is committed: where most that goes wrong with vaults begins."""

from __future__ import annotations

from typing import Any

from deadpool_megatron.layout.records import Generation, Inventory, Restore, RoleLayout, Seat
from deadpool_megatron.vault.shm.segment import Segment
from tests.vault.harness import Cluster, Member, Node, make_layout, sources_from

LAYOUTS = {role: make_layout(role) for role in range(2)}
FIRST = Generation(1, 0)


def begin(
    running: Cluster, layouts: dict[int, RoleLayout] | None = None, last: int = 0
) -> list[Member]:
    """Open epoch 1 and commit the generations 0 to ``last`` of every role."""
    chosen = layouts or LAYOUTS
    running.open(running.record(1))
    members = [Member(running.nodes[role], chosen[role]) for role in sorted(chosen)]
    for member in members:
        member.client.register(member.layout, 1)
    for iteration in range(last + 1):
        for member in members:
            member.write(Generation(1, iteration))
        for member in members:
            assert member.wait(Generation(1, iteration)) == "committed"
    return members


def swap(
    running: Cluster, inventories: dict[int, Inventory], kept: Generation, first: int | None = None
) -> Any:
    """The record of epoch 2 in which spare node 2 takes role 1."""
    found = sources_from(inventories, kept, LAYOUTS, first=first)
    restore = Restore("memory", kept, sources=found)
    return running.record(2, restore, {0: Seat(0, 0, 0), 1: Seat(2, 0, 0)}, gone={1})


def flip(node: Node, name: str, generation: Generation, part: str) -> None:
    """Damage one byte of a slot behind everybody's back."""
    segment = Segment.open(node.directory / name)
    for slot in range(segment.layout.slots):
        if segment.generation(slot) == generation:
            segment.data(slot, part)[5] ^= 0x10
