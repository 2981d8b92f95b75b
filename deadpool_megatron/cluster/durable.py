"""Making a durable checkpoint valid: one rename, after everything in it has reached the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from deadpool_megatron.cluster.run_directory import RunDirectory, write_json
from deadpool_megatron.layout.records import Restore


class DurableError(Exception):
    """The checkpoint did not become valid; one clear line."""


def make_valid(temporary: Path, final: Path, restore: Restore, run: RunDirectory) -> None:
    """Sync the files, rename the directory, then point ``latest.json`` at it.

    ``temporary`` may be ``final`` itself, where a loop writes in place. Otherwise a checkpoint of
    the same name is left alone: it was made valid by an earlier request, and the
    one at hand repeats it after a recovery. Raises DurableError. Runs in a worker thread.
    """
    try:
        if temporary == final:
            _sync(final)  # its writer has synced the files
        elif final.exists():
            shutil.rmtree(temporary, ignore_errors=True)
        elif temporary.is_dir():
            for path in sorted(temporary.rglob("*")):
                if path.is_file():
                    _sync(path)
            _sync(temporary)
            temporary.rename(final)
            _sync(final.parent)
        else:
            raise DurableError(f"{temporary} is not a directory")
        for leftover in final.parent.glob(".iter_*.epoch*"):
            # Of saves that a failure interrupted; this one is the only save of the open epoch.
            if leftover != temporary:
                shutil.rmtree(leftover, ignore_errors=True)
        write_json(run.latest, restore.to_dict())
    except OSError as error:
        raise DurableError(f"{error.filename}: {error.strerror}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
