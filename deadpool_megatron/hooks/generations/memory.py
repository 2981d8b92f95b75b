"""Is there memory for the generations of this node? Looked at before the first slot is made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deadpool_megatron.hooks.generations.pinning import PinnedSlots
from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import NoRoom
from deadpool_megatron.vault.member.client import VaultClient
from deadpool_megatron.vault.memory.limits import memlock_bytes
from deadpool_megatron.vault.memory.needs import node_needs, objection, warnings
from deadpool_megatron.vault.memory.usable import node_rooms


def admit(
    layout: RoleLayout,
    directory: Path,
    roles_per_node: int,
    settings: Settings,
    *,
    nodes: int,
    pinned: bool,
) -> list[str]:
    """Warnings, one line each. ``directory``: the node's, of which other members may have taken
    their part already; ``nodes``: of the run. Raises NoRoom with one line that names needs, limit
    and remedy.
    """
    needs = node_needs(layout, roles_per_node, settings, nodes)
    rooms = node_rooms(directory, settings.memory_bytes)
    if trouble := objection(needs, rooms):
        raise NoRoom(trouble)
    return warnings(needs, rooms, memlock_bytes(), pinned=pinned)


def park(
    vault: VaultClient,
    layout: RoleLayout,
    roles_per_node: int,
    settings: Settings,
    pinned: PinnedSlots,
    copied_parts: Sequence[str],
    *,
    nodes: int,
) -> None:
    """Make slots for a role that is not played yet, and page-lock the ``copied_parts`` in them.
    Raises NoRoom where the node has not the memory for them and for what it may have to keep for
    others, which comes first."""
    admit(layout, vault.directory, roles_per_node, settings, nodes=nodes, pinned=False)
    vault.park(layout)
    pinned.pin(vault.slot_views(copied_parts))
