"""Roles whose first generation is committed: where most that goes wrong with vaults begins."""

from collections.abc import Collection

from deadpool_megatron.layout.records import EpochRecord, Generation, Inventory, RoleLayout, Seat
from deadpool_megatron.vault.shm.segment import Segment
from tests.vault.harness import Cluster, Member, Node, make_layout, memory, train

LAYOUTS = {role: make_layout(role) for role in range(2)}
FIRST = Generation(1, 0)
SPARE = Seat(2, 0, 0)


def begin(
    running: Cluster, layouts: dict[int, RoleLayout] | None = None, last: int = 0
) -> list[Member]:
    """Open epoch 1 and commit the generations 0 to ``last`` of every role."""
    members = running.join(layouts or LAYOUTS)
    train(members, *(Generation(1, iteration) for iteration in range(last + 1)))
    return members


def swap(
    running: Cluster,
    inventories: dict[int, Inventory],
    kept: Generation,
    layouts: dict[int, RoleLayout] | None = None,
    *,
    epoch: int = 2,
    to: Seat = SPARE,
    gone: Collection[int] = (1,),
    boundary: str = "step",
    first: int | None = None,
) -> EpochRecord:
    """The record of epoch 2, unless told, in which spare node 2 takes role 1."""
    restore = memory(inventories, kept, layouts or LAYOUTS, boundary, first)
    return running.record(epoch, restore, {0: Seat(0, 0, 0), 1: to}, gone)


def flip(node: Node, name: str, generation: Generation, part: str) -> None:
    """Damage one byte of a slot behind everybody's back."""
    segment = Segment.open(node.directory / name)
    for slot in range(segment.layout.slots):
        if segment.generation(slot) == generation:
            segment.data(slot, part)[5] ^= 0x10
