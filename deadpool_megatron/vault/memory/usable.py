"""What limits the memory for generations of this node: user, file system, cgroup."""

from __future__ import annotations

from pathlib import Path

from deadpool_megatron.vault.memory.budget import allocated_bytes
from deadpool_megatron.vault.memory.limits import cgroup_memory, free_bytes
from deadpool_megatron.vault.memory.needs import Room


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


def usable_bytes(directory: Path, limit_bytes: int) -> int:
    """What all of it leaves for the node's generations, those that are there included."""
    return min(room.nbytes for room in node_rooms(directory, limit_bytes))
