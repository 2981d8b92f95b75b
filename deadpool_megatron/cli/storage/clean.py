"""Removes what dead runs have left on this host.

Removes the shared memory of runs on this host. Without DIR: of every run that has no live process
and that no command can continue. With DIR: of that run; if it can continue, the command asks first,
and its live processes are killed only with --force.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.run_directory import cleanup, directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.ownership import OwnershipError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_dir", type=Path, nargs="?", metavar="DIR", help="run directory")
    parser.add_argument("--force", action="store_true", help="even if the run is alive")
    parser.add_argument("--yes", action="store_true", help="with DIR: do not ask")


def run(args: argparse.Namespace) -> int:
    """Clean up, and print what was removed."""
    if args.run_dir is not None:
        directory = RunDirectory(args.run_dir)
        run_id = directory.read_run().run_id
        if not args.force and _is_alive(directory, run_id):
            raise CommandError(f"the run in {directory.path} is alive: stop it, or use --force")
        memory = cleanup.kept_memory(directory, run_id)
        if memory and not args.yes and not _agrees(memory):
            print("left as it is")
            return 0
        _clean(directory, run_id)
        return 0
    runs = cleanup.runs_in_memory()
    if not runs:
        print("nothing to clean")
    for run_id, path in runs.items():
        directory = _directory_of(run_id, path)
        if not args.force and _is_alive(directory, run_id):
            print(f"run {run_id} in {directory.path} is alive: left alone")
            continue
        memory = cleanup.kept_memory(directory, run_id) if directory.path == path else ""
        if memory and not args.force:
            print(f"{memory}: left alone")
            continue
        _clean(directory, run_id)
    return 0


def _agrees(memory: str) -> bool:
    """Return whether the user confirms. Raises CommandError without a terminal."""
    if not sys.stdin.isatty():
        raise CommandError(f"{memory}; without a terminal, confirm with --yes")
    return input(f"{memory}. Remove it? [y/N] ").strip().lower() in ("y", "yes")


def _directory_of(run_id: str, path: Path | None) -> RunDirectory:
    """Return the run directory that the shared memory names. If that directory is removed, or
    belongs to another run or another user, return the folder of the memory, in which no process is
    listed."""
    if path is not None:
        directory = RunDirectory(path)
        try:
            if directory.read_run().run_id == run_id:
                return directory
        except (OSError, run_files.RunDirectoryError):
            pass
        except OwnershipError as error:
            print(f"run {run_id}: {error}")
    return RunDirectory(run_files.segment_root(run_id))


def _is_alive(directory: RunDirectory, run_id: str) -> bool:
    """Return whether a process of the run is alive on this host; a vault alone, which may be an
    orphan, does not count."""
    return bool(cleanup.working_processes(directory, run_id)) or cleanup.is_held(run_id)


def _clean(directory: RunDirectory, run_id: str) -> None:
    cleaned: cleanup.Cleaned = cleanup.clean_run(directory, run_id)
    print(
        f"run {run_id}: {len(cleaned.pids)} processes killed,"
        f" {cleaned.nbytes / 2**20:.1f} MiB of shared memory removed"
    )
