"""Is there memory for the generations of this node? Looked at before the first slot is made."""

from __future__ import annotations

from pathlib import Path

from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.budget import allocated_bytes
from deadpool_megatron.vault.errors import NoRoom
from deadpool_megatron.vault.limits import cgroup_memory, free_bytes, memlock_bytes
from deadpool_megatron.vault.needs import Room, node_needs, objection, warnings
from deadpool_megatron.vault.segment import segment_bytes


def admit(
    layout: RoleLayout, directory: Path, roles_per_node: int, settings: Settings, *, pinned: bool
) -> list[str]:
    """Warnings, one line each. ``directory``: the node's, of which other members may have taken
    their part already. Raises NoRoom with one line that names needs, limit and remedy.
    """
    needs = node_needs(layout, segment_bytes(layout), roles_per_node, settings)
    rooms = node_rooms(directory, settings.memory_bytes)
    if trouble := objection(needs, rooms):
        raise NoRoom(trouble)
    return warnings(needs, rooms, memlock_bytes(), pinned=pinned)


def node_rooms(directory: Path, limit_bytes: int) -> list[Room]:
    """What limits the node's generations, in all; ``limit_bytes`` is the user's, 0 for none."""
    used = allocated_bytes(directory)
    rooms = [
        Room(
            f"the file system of {directory} (/dev/shm)",
            free_bytes(directory) + used,
            "enlarge it (mount -o remount,size=..., docker --shm-size), 'deadpool clean'",
        )
    ]
    if limit_bytes:
        rooms.append(Room("--deadpool-memory-gb", limit_bytes, "raise it"))
    group = cgroup_memory()
    if group is not None:
        text = f"the memory limit of cgroup {group.path} ({group.limit_bytes} bytes)"
        remedy = "ask for more memory (sbatch --mem, docker --memory): shared memory counts in it"
        rooms.append(Room(text, group.left_bytes + used, remedy))
    return rooms
