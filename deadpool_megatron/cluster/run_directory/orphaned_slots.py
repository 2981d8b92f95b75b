"""Slots that outlive their agent, and the lock by which an agent owns a node's directory.

Slots stay where they are when an agent ends before the run does: killed, cut off, or orphaned by
its launcher. Their owner is the process that holds the lock in their directory. The next agent of
the same node takes them over; an agent that returns under another number moves them to its own
directory. An agent removes its slots when the run is over or has given up the node. Slots without
an agent are removed by any agent of the host when the run ends well, by a run that resumes a failed
run and has written them to disk, and by ``deadpool clean``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from deadpool_megatron import ownership
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup, directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.file_systems import HeldName
from deadpool_megatron.vault.disk.dump import newest_sealed

_LOCK = "agent.lock"


class NodeTaken(Exception):
    """Another agent on this host already serves the node with this number."""


def claim(segments: Path, node: int) -> int:
    """Lock the node's segments for this process: a second agent would overwrite them.

    Returns the lock, which holds until it is closed. Raises NodeTaken, or OwnershipError when the
    directory is open to other users.
    """
    ownership.make_private(segments)
    return _lock(segments, node)


def _lock(segments: Path, node: int) -> int:
    """Lock an existing directory, but do not create it, as its agent may be removing it.

    Raises NodeTaken, or FileNotFoundError for a directory that is being removed.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(segments / _LOCK, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise NodeTaken(f"node {node} already has an agent on this host") from error
    return lock


def held_names(run: RunDirectory, run_id: str, node: int, segments: Path) -> list[HeldName]:
    """Return the names in shared memory that an agent creates again if other programs remove them;
    the vault does that for the segments. Locks that are taken again are held until this process
    ends."""
    locks: list[int] = []
    logs = segments / run_files.LOGS
    return [
        HeldName(
            cleanup.owner_file(run_id), lambda: locks.append(cleanup.claim_segments(run, run_id))
        ),
        HeldName(segments / _LOCK, lambda: locks.append(claim(segments, node))),
        HeldName(logs, lambda: ownership.make_private(logs)),
    ]


def end_orphaned_processes(run: RunDirectory, run_id: str, node: int, segments: Path) -> None:
    """End the processes that a dead agent has left; the caller holds the lock of the directory.

    A vault outlives its agent for a while, and two vaults must not write into the same slots.
    """
    pids = set(cleanup.node_processes(run, node))
    directory = str(segments).encode()
    for pid in posix.processes_with_environment(run_files.ENVIRONMENT_RUN_ID, run_id):
        try:
            if directory in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                pids.add(pid)
        except OSError:
            continue  # the process has ended in the meantime
    cleanup.end_processes(sorted(pids - {os.getpid()}))


def adopt_slots(
    run: RunDirectory, run_id: str, own: Path, siblings: Collection[int] = ()
) -> int | None:
    """Move the slots of a node that has no agent any more into ``own``, the directory of another
    node of this host. Return the former node, or None if no slots were moved. The nodes
    ``siblings`` are excluded, because their agents may be about to start.

    The node with the newest generation is preferred. If ``own`` has slots, no slots are moved.
    """
    if any(own.glob("*.seg")):
        return None
    candidates = []
    for directory in cleanup.node_directories(run_id):
        name = directory.name.removeprefix("node")
        if directory == own or not name.isdigit() or int(name) in siblings:
            continue
        if any(directory.glob("*.seg")):
            candidates.append((newest_sealed(directory), int(name), directory))
    for _, number, directory in sorted(candidates, reverse=True):
        try:
            lock = _lock(directory, number)
        except (NodeTaken, FileNotFoundError):
            continue  # its agent is alive, or another agent was faster
        try:
            end_orphaned_processes(run, run_id, number, directory)
            cleanup.copy_logs(run, directory)
            segments = sorted(directory.glob("*.seg"))
            for path in segments:
                path.rename(own / path.name)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
        if segments:
            return number
    return None


def remove_unclaimed(run: RunDirectory, run_id: str) -> None:
    """Remove the directories on this host without an agent, after the end of the run."""
    for directory in cleanup.node_directories(run_id):
        try:
            lock = _lock(directory, -1)
        except (NodeTaken, FileNotFoundError):
            continue
        cleanup.copy_logs(run, directory)
        cleanup.remove_segments(directory)
        os.close(lock)
