"""A file with tensors that no iteration changes, written once and named after its content.

It holds their bytes one after the other. Its name is made of two checksums (xxh3, 128 bits), that
of the names, dtypes and shapes, and that of the bytes. So roles with equal tensors share one file,
the first process writes it, and a reader can prove that it read what was written.

The writer announces itself by a second file, ``.NAME``, the claim, which gets a byte for each piece
that is on the disk; other processes wait while it grows. A claim only saves work: each writer has
an unfinished file of its own, ``.NAME.TOKEN``, and only a complete file gets the name.

The command copies such files to another run and verifies them, without torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from deadpool_megatron import failpoints, ownership
from deadpool_megatron.file_systems import sync

if TYPE_CHECKING:
    from torch import Tensor

_PIECE_BYTES = 64 << 20
_POLL_SECONDS = 0.05
# A claim that has not grown for this time has lost its writer.
_GRACE_SECONDS = 10.0
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC

Named = Sequence[tuple[str, "Tensor"]]
# Waits that many seconds; raises where the operation must be abandoned.
Wait = Callable[[float], None]


class FrozenFileError(Exception):
    """The file is missing or does not match its name; the message is one line."""


def size_of(tensors: Named) -> int:
    """Return the size of the file that holds these tensors, in bytes."""
    return sum(tensor.nbytes for _, tensor in tensors)


def name_of(tensors: Named, wait: Wait) -> str:
    """Return the name of the file that holds them. Reads all their bytes; raises as ``wait``
    does."""
    digest = xxhash.xxh3_128()
    for piece in _pieces(tensors):
        wait(0)
        digest.update(piece)
    return f"{_description(tensors)}-{digest.hexdigest()}"


def write(folder: Path, name: str, tensors: Named, wait: Wait) -> None:
    """Write the file ``name`` unless it is there, or wait for the process that does.

    Raises OSError, and as ``wait`` does; then no unfinished file of this process remains.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, claim = folder / name, folder / f".{name}"
    grown, size = time.monotonic(), -1
    while not _is_whole(path, tensors):
        try:
            handle = os.open(claim, _NEW, 0o600)
        except FileExistsError:
            now = time.monotonic()
            if (found := _size(claim)) != size:
                grown, size = now, found
            elif now - grown > _GRACE_SECONDS:
                claim.unlink(missing_ok=True)
                grown, size = now, -1
            wait(_POLL_SECONDS)
            continue
        try:
            with os.fdopen(handle, "wb", buffering=0) as claimed:
                _write(path, tensors, claimed.write, wait)
        finally:
            claim.unlink(missing_ok=True)


def read(folder: Path, name: str, tensors: Named, wait: Wait) -> None:
    """Read the file into the tensors. Raises FrozenFileError, and as ``wait`` does; the tensors may
    then hold anything."""
    import torch

    if name.partition("-")[0] != _description(tensors):
        raise FrozenFileError(f"{folder / name} holds other weights than this model's: their names")
    digest = xxhash.xxh3_128()
    try:
        with os.fdopen(ownership.open_own(folder / name), "rb") as file, torch.no_grad():
            for _, tensor in tensors:
                values = tensor.detach()
                target = values.contiguous()
                flat = target.view(-1).view(torch.uint8)
                for start in range(0, flat.numel(), _PIECE_BYTES):
                    wait(0)
                    part = flat[start : start + _PIECE_BYTES]
                    content = bytearray(part.numel())
                    if file.readinto(content) != len(content):
                        raise FrozenFileError(f"{folder / name} ends too early")
                    digest.update(content)
                    part.copy_(torch.frombuffer(content, dtype=torch.uint8))
                if target is not values:
                    values.copy_(target)
            is_over = not file.read(1)
    except (OSError, ownership.OwnershipError) as error:
        raise _unreadable(folder / name, error) from error
    if not is_over or not _fits(name, digest):
        raise FrozenFileError(f"{folder / name} does not hold what was written there")


def mapped(folder: Path, name: str) -> memoryview:
    """Return all bytes of the file, verified. Raises FrozenFileError."""
    try:
        with os.fdopen(ownership.open_own(folder / name), "rb") as file:
            # Private, not read-only: torch warns of tensors in memory that cannot be written.
            found = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
    except (OSError, ValueError, ownership.OwnershipError) as error:
        raise _unreadable(folder / name, error) from error
    if not _fits(name, xxhash.xxh3_128(found)):
        raise FrozenFileError(f"{folder / name} does not hold what was written there")
    return found


def files_in(folder: Path) -> list[Path]:
    """Return the complete files of the folder: those that have their final name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def copy_files(
    source: Path, folder: Path, progress: Callable[[float], None] = lambda _: None
) -> int:
    """Link the files of another run into ``folder``, or copy them to another file system.

    Several processes may do so at once. ``progress`` gets the finished part (0 to 1) before each
    file. Returns the bytes copied; raises OSError.
    """
    copied, found = 0, files_in(source)
    for at, path in enumerate(found):
        progress(at / len(found))
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


def problem_in(path: Path, progress: Callable[[int], None]) -> str:
    """Return the reason why a file does not match its name; empty if it does. ``progress`` gets the
    bytes read since the last call."""
    digest = xxhash.xxh3_128()
    try:
        with os.fdopen(ownership.open_own(path), "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                progress(len(piece))
    except (OSError, ownership.OwnershipError) as error:
        return str(error)
    return "" if _fits(path.name, digest) else "it does not hold what was written there"


def _copy(path: Path, half: Path) -> int:
    """Copy a file to the disk, and return its size in bytes."""
    handle = os.open(half, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as target, open(path, "rb") as source:
        shutil.copyfileobj(source, target, _PIECE_BYTES)
        target.flush()
        os.fsync(handle)
        return target.tell()


def _fits(name: str, digest: xxhash.xxh3_128) -> bool:
    """Return whether a file of this name holds bytes of this checksum."""
    return digest.hexdigest() == name.rpartition("-")[2]


def _unreadable(path: Path, error: Exception) -> FrozenFileError:
    reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return FrozenFileError(f"frozen weights cannot be read from {path}: {reason}; restore the file")


def _is_whole(path: Path, tensors: Named) -> bool:
    return _size(path) == size_of(tensors)


def _size(path: Path) -> int:
    """Return the size of a file that another host may be writing: only opening it asks a network
    file system. -1 where there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return -1


def _write(path: Path, tensors: Named, grow: Callable[[bytes], object], wait: Wait) -> None:
    """Write the file unless another process is faster; ``grow`` extends the claim."""
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(half, _NEW, 0o600), "wb") as file:
            for piece in _pieces(tensors):
                wait(0)
                if _is_whole(path, tensors):
                    return
                file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                grow(b".")
                failpoints.hit("frozen.write")
        # A process that was faster has removed the unfinished files of all others.
        with contextlib.suppress(FileNotFoundError):
            half.rename(path)
            sync(path.parent)
            for unfinished in path.parent.glob(f".{path.name}.*"):
                unfinished.unlink(missing_ok=True)
    finally:
        half.unlink(missing_ok=True)


def _description(tensors: Named) -> str:
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)}\n" for name, tensor in tensors]
    return xxhash.xxh3_128("".join(lines).encode()).hexdigest()


def _pieces(tensors: Named) -> Iterator[memoryview]:
    """Yield their bytes on the host, in pieces that need little memory."""
    from deadpool_megatron.state.parts import flat_bytes

    for _, tensor in tensors:
        flat = flat_bytes(tensor)
        for start in range(0, flat.numel(), _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES].cpu().numpy().data
