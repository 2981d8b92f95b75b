"""Processes and shared memory that a run may leave on this host, and their removal.

A process belongs to a run if its environment *at exec* names the run (vaults, the coordinator,
members started by exec), or if a node's listing names it with its start time (forked agents and
members show the environment of their launcher). A pid alone is never enough: pids are reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron import ownership
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.logs import LogCopier
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.file_systems import write_once

_PREFIX = "deadpool-"
_OWNER = "owner.json"
_END_SECONDS = 5.0
_HOLD_TRIES, _HOLD_PAUSE_SECONDS = 50, 0.01


@dataclass(frozen=True)
class Cleaned:
    """The result of a removal: pids, bytes and directories of shared memory."""

    pids: tuple[int, ...]
    nbytes: int
    directories: tuple[Path, ...]


def owner_file(run_id: str) -> Path:
    """Return the file that names the owner of the run's shared memory."""
    return run_files.segment_root(run_id) / _OWNER


def claim_segments(run: RunDirectory, run_id: str) -> int:
    """Create the run's shared-memory directory and record its owner, for a later clean-up.

    Returns a descriptor; until it is closed :func:`is_held` is true on this host. An agent needs
    that while it joins again under another number: no listing names it, but its slots are in use.
    Raises OwnershipError if another user creates a directory of this name at the same time.
    """
    ownership.make_private(run_files.segment_root(run_id))
    owner = owner_file(run_id)
    text = json.dumps({"run_dir": str(run.path), "run_id": run_id}) + "\n"
    # The file appears complete, and all holders use the same file, unless the run has moved.
    if not write_once(owner, text.encode(), 0o600) and owner.read_text() != text:
        run_files.write_json(owner, json.loads(text))
    handle = os.open(owner, os.O_RDONLY | os.O_CLOEXEC)
    for _ in range(_HOLD_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # is_held() is testing the lock now
            time.sleep(_HOLD_PAUSE_SECONDS)
    return handle


def is_held(run_id: str) -> bool:
    """Return whether a process on this host holds a descriptor of :func:`claim_segments`."""
    if not ownership.is_private(run_files.segment_root(run_id)):
        return False
    try:
        owner = os.open(owner_file(run_id), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(owner)
    return False


def listing(vault: int, members: Mapping[int, tuple[int, int]], segments: Path) -> str:
    """Return the text of the file that lists the processes of the calling agent's node.

    ``members``: local rank -> (pid, incarnation). Fail points and clean-up read it, so it is
    rewritten whenever a process starts or ends.
    """
    pids = [os.getpid(), vault, *(pid for pid, _ in members.values())]
    values = {
        "agent": os.getpid(),
        "vault": vault,
        "members": {str(local_rank): pid for local_rank, (pid, _) in members.items()},
        "segment_dir": str(segments),
        "slots": {str(local_rank): incarnation for local_rank, (_, incarnation) in members.items()},
        "hostname": socket.gethostname(),
        "started": {str(pid): posix.start_time(pid) for pid in pids},
    }
    return json.dumps(values, indent=1) + "\n"


def remove_segments(directory: Path) -> None:
    """Remove a node's directory, and the run's directory if that was the run's last node on this
    host."""
    shutil.rmtree(directory, ignore_errors=True)
    root = directory.parent
    try:
        is_last = all(entry.name == _OWNER for entry in root.iterdir())
    except FileNotFoundError:
        return  # another node of the run has removed the directory
    if is_last:
        shutil.rmtree(root, ignore_errors=True)


def run_processes(run: RunDirectory, run_id: str) -> list[int]:
    """Return the live processes of the run on this host, except the calling process."""
    pids = {*posix.processes_with_environment(run_files.ENVIRONMENT_RUN_ID, run_id)}
    for listing in run.node_listings().values():
        pids |= set(_pids_in(listing))
    pids |= set(coordinator_processes(run))
    return sorted(pid for pid in pids - {os.getpid()} if posix.is_alive(pid))


def working_processes(run: RunDirectory, run_id: str) -> list[int]:
    """Return the live processes of the run on this host, except vaults, which outlive the other
    processes for a while."""
    pids = []
    for pid in run_processes(run, run_id):
        with contextlib.suppress(OSError):  # the process has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            pids += [] if b"deadpool_megatron.vault" in command else [pid]
    return pids


def coordinator_processes(run: RunDirectory) -> list[int]:
    """Return the listed coordinator process, if it is alive on this host."""
    return _pids_in_file(run, run.coordinator)


def node_processes(run: RunDirectory, node: int) -> list[int]:
    """Return the live processes of a node, from its listing."""
    return _pids_in_file(run, run.node(node))


def _pids_in_file(run: RunDirectory, path: Path) -> list[int]:
    try:
        run.check_own()
        return _pids_in(run_files.read_json(path))
    except (OSError, ValueError, TypeError, AttributeError):
        return []  # there is no listing, or another version has written it


def is_here(listing: Mapping[str, Any]) -> bool:
    """Return whether a listing was written by an agent of this host."""
    own = socket.gethostname()
    return bool(listing.get("hostname", own) == own)


def _pids_in(listing: dict[str, Any]) -> list[int]:
    """Return the live processes of a listing; none for a listing of another host, whose pids mean
    nothing here."""
    if not is_here(listing):
        return []
    started = listing.get("started", {})
    return [
        int(pid)
        for pid, ticks in started.items()
        if ticks is not None and posix.is_alive(int(pid), int(ticks))
    ]


def end_processes(pids: list[int]) -> None:
    """Kill each process, with its group if it leads a group, and wait until they have ended."""
    for pid in pids:
        try:
            leads = os.getpgid(pid) == pid
        except ProcessLookupError:
            continue
        posix.kill(pid)
        if leads:
            posix.kill_group(pid)
    posix.wait_until_ended(pids, _END_SECONDS)


def clean_node(run: RunDirectory, run_id: str, node: int, *, keep_slots: bool = False) -> Cleaned:
    """Remove the processes and the memory of a dead agent's node, as if its host had been switched
    off. ``keep_slots``: leave the memory."""
    pids = node_processes(run, node)
    end_processes(pids)
    copy_logs(run, run.segments(run_id, node))
    nbytes, directories = _remove([] if keep_slots else [run.segments(run_id, node)])
    run.check_own()
    run.node(node).unlink(missing_ok=True)
    return Cleaned(tuple(pids), nbytes, directories)


def clean_run(run: RunDirectory, run_id: str, *, keep_slots: bool = False) -> Cleaned:
    """Kill every process of the run on this host. Remove its shared memory too, unless
    ``keep_slots`` keeps it for a restart. Nodes of other hosts may be alive, and stay listed."""
    pids = run_processes(run, run_id)
    end_processes(pids)
    for directory in node_directories(run_id):
        copy_logs(run, directory)
    nbytes, directories = _remove([] if keep_slots else [run_files.segment_root(run_id)])
    for node, listing in run.node_listings().items():
        if is_here(listing):
            run.node(node).unlink(missing_ok=True)
    return Cleaned(tuple(pids), nbytes, directories)


def node_directories(run_id: str) -> list[Path]:
    """Return the directories of the run's nodes in this host's shared memory; none where another
    user owns the name."""
    root = run_files.segment_root(run_id)
    return sorted(root.glob("node*")) if ownership.is_private(root) else []


def runs_in_memory() -> dict[str, Path | None]:
    """Return this user's runs with shared memory on this host: run id -> run directory (None if it
    is not noted). Directories of other users are skipped."""
    runs: dict[str, Path | None] = {}
    for root in sorted(run_files.SEGMENT_ROOT.glob(_PREFIX + "*")):
        run_id = root.name.removeprefix(_PREFIX).partition(".")[0]
        if not run_files.RUN_ID.fullmatch(run_id) or not ownership.is_private(root):
            continue
        try:
            directory = Path(str(run_files.read_json(root / _OWNER)["run_dir"]))
        except (OSError, ValueError, KeyError):
            directory = None
        runs[run_id] = directory
    return runs


def kept_memory(run: RunDirectory, run_id: str) -> str:
    """Return one line on the run's memory on this host, with the commands to resume or remove it.
    Return an empty text if the run is over without kept slots, or has no slots here."""
    nodes = [directory for directory in node_directories(run_id) if any(directory.glob("*.seg"))]
    if not nodes or (run.final.exists() and not run_files.slots_are_kept(run)):
        return ""
    size, place = f"{sum(map(_bytes_in, nodes)) / 2**20:.1f} MiB", str(run.path)
    try:
        run.check_own()
    except OSError:
        place = "WHERE ITS DIRECTORY IS NOW"
    return (
        f"run {run_id} holds {size} in memory: the same command"
        f" (--run-dir {place}) continues from it, 'deadpool clean {place}' removes it"
    )


def may_be_alive(run: RunDirectory) -> bool:
    """Return whether an agent may be alive, so that a new coordinator may start: a live agent of
    this host, or any agent of another host, of which this host knows nothing."""
    agents = [(listing, listing["agent"]) for listing in run.node_listings().values()]
    if not agents:
        return not run.coordinator.exists() or bool(coordinator_processes(run))
    # The pid may belong to another process by now.
    return any(
        not is_here(listing) or posix.is_alive(pid, listing.get("started", {}).get(str(pid)))
        for listing, pid in agents
    )


def remaining_memory(run: RunDirectory) -> str:
    """Return a line on the memory of a run on this host, if the run has ended and kept its slots,
    or was interrupted and has no live process. Return an empty text for any other run."""
    if not run_files.slots_are_kept(run) if run.final.exists() else may_be_alive(run):
        return ""
    try:
        run_id = run.read_run(only_to_show=True).run_id
    except run_files.RunDirectoryError:
        return ""
    return kept_memory(run, run_id) or f"nothing of it is in the memory of {socket.gethostname()}"


def copy_logs(run: RunDirectory, segments: Path) -> None:
    """Copy the last output of a node, which may be only in the memory of the host."""
    LogCopier(segments / run_files.LOGS, run.logs).copy()


def _remove(roots: list[Path]) -> tuple[int, tuple[Path, ...]]:
    """Remove directories of this user. Return their bytes and paths."""
    nbytes, removed = 0, []
    for root in roots:
        # A directory of another user has nothing of the run in it, and must not be removed.
        if not ownership.is_private(root):
            continue
        nbytes += _bytes_in(root)
        shutil.rmtree(root, ignore_errors=True)
        removed.append(root)
    return nbytes, tuple(removed)


def _bytes_in(root: Path) -> int:
    """Return the bytes that the files below ``root`` take. A live node may remove files at the same
    time."""
    nbytes = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            nbytes += path.lstat().st_blocks * 512
    return nbytes
