"""The files of frozen weights that a run directory has: for another run, and to be verified.

What is in them is for :mod:`deadpool_megatron.persist.frozen_file` to know. Loads no torch.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from deadpool_megatron import ownership
from deadpool_megatron.file_systems import sync

_PIECE_BYTES = 16 << 20


def fits(name: str, digest: xxhash.xxh3_128) -> bool:
    """Return whether a file of this name holds bytes of this checksum."""
    return digest.hexdigest() == name.rpartition("-")[2]


def files_in(folder: Path) -> list[Path]:
    """Those that have their name, and so are whole."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def bring(source: Path, folder: Path) -> int:
    """Have the files of another run in ``folder`` too: as links where both lie in one file system,
    else as copies. Several processes may do so at once. Returns the bytes copied; raises OSError.
    """
    copied = 0
    for path in files_in(source):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = folder / path.name
        if target.exists():
            continue
        half = target.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            try:
                os.link(path, half, follow_symlinks=False)
            except OSError:
                copied += _copy(path, half)
            half.rename(target)
            sync(folder)
        finally:
            half.unlink(missing_ok=True)
    return copied


def _copy(path: Path, half: Path) -> int:
    """On the disk when this returns."""
    handle = os.open(half, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as target, open(path, "rb") as source:
        shutil.copyfileobj(source, target, _PIECE_BYTES)
        target.flush()
        os.fsync(handle)
        return target.tell()


def trouble_with(path: Path, progress: Callable[[int], None]) -> str:
    """Return why a file does not hold what its name says; empty if it does. ``progress`` gets the
    bytes read since the last call."""
    digest = xxhash.xxh3_128()
    try:
        with os.fdopen(ownership.open_own(path), "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                progress(len(piece))
    except (OSError, ownership.OwnershipError) as error:
        return str(error)
    return "" if fits(path.name, digest) else "it does not hold what was written there"
