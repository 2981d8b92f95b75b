"""A file with tensors that no iteration changes, written once and named after its content.

The file has the bytes of the tensors in a row. Its name consists of two checksums (xxh3, 128 bits):
that of the names, dtypes and shapes, and that of the bytes. So roles with equal tensors share a
file, which the first of their processes writes, and a reader can verify the bytes.

A writer creates a second file, ``.NAME``, the claim, and adds a byte for each piece that is on the
disk. Other processes wait while the claim grows. The claim only saves work: each writer has an
unfinished file of its own, ``.NAME.TOKEN``, and only a complete file gets the name.

The ``deadpool`` command copies such files to another run and verifies them, without torch.
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
# The writer of a claim that has not grown for this time is considered dead.
_GRACE_SECONDS = 10.0
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC

NamedTensors = Sequence[tuple[str, "Tensor"]]
# A function that waits for a number of seconds, and raises if the operation must be abandoned.
Wait = Callable[[float], None]


class FrozenFileError(Exception):
    """The file is missing or does not match its name; the message is a line."""


def size_of(tensors: NamedTensors) -> int:
    """Return the size of the file that holds these tensors, in bytes."""
    return sum(tensor.nbytes for _, tensor in tensors)


def name_of(tensors: NamedTensors, wait: Wait) -> str:
    """Return the name of the file that holds these tensors. Reads all their bytes; raises as
    ``wait`` does."""
    digest = xxhash.xxh3_128()
    for piece in _pieces(tensors):
        wait(0)
        digest.update(piece)
    return f"{_description(tensors)}-{digest.hexdigest()}"


def write(folder: Path, name: str, tensors: NamedTensors, wait: Wait) -> None:
    """Write the file ``name``, or wait for another process that writes it, unless it exists.

    Raises OSError, and as ``wait`` does; no unfinished file of this process remains then.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, claim = folder / name, folder / f".{name}"
    grown_at, size = time.monotonic(), -1
    while not _is_whole(path, tensors):
        try:
            handle = os.open(claim, _NEW, 0o600)
        except FileExistsError:
            now = time.monotonic()
            if (new_size := _size(claim)) != size:
                grown_at, size = now, new_size
            elif now - grown_at > _GRACE_SECONDS:
                claim.unlink(missing_ok=True)
                grown_at, size = now, -1
            wait(_POLL_SECONDS)
            continue
        try:
            with os.fdopen(handle, "wb", buffering=0) as claimed:
                _write(path, tensors, claimed.write, wait)
        finally:
            claim.unlink(missing_ok=True)


def read(folder: Path, name: str, tensors: NamedTensors, wait: Wait) -> None:
    """Read the file into the tensors. Raises FrozenFileError, and as ``wait`` does; the content of
    the tensors is then undefined."""
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
            is_at_end = not file.read(1)
    except (OSError, ownership.OwnershipError) as error:
        raise _unreadable(folder / name, error) from error
    if not is_at_end or not _fits(name, digest):
        raise FrozenFileError(f"{folder / name} does not hold what was written there")


def map_verified(folder: Path, name: str) -> memoryview:
    """Map the file, verify it, and return its bytes. Raises FrozenFileError."""
    try:
        with os.fdopen(ownership.open_own(folder / name), "rb") as file:
            # Private, not read-only: torch warns of tensors in memory that cannot be written.
            content = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
    except (OSError, ValueError, ownership.OwnershipError) as error:
        raise _unreadable(folder / name, error) from error
    if not _fits(name, xxhash.xxh3_128(content)):
        raise FrozenFileError(f"{folder / name} does not hold what was written there")
    return content


def files_in(folder: Path) -> list[Path]:
    """Return the complete files of the folder, which have their final name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def copy_files(
    source: Path, folder: Path, progress: Callable[[float], None] = lambda _: None
) -> int:
    """Link the files of another run into ``folder``, or copy them to another file system.

    Several processes may do this at once. ``progress`` gets the finished share (0 to 1) before each
    file. Return the number of bytes copied. Raises OSError.
    """
    copied, paths = 0, files_in(source)
    for index, path in enumerate(paths):
        progress(index / len(paths))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = folder / path.name
        if target.exists():
            continue
        unfinished = target.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            try:
                os.link(path, unfinished, follow_symlinks=False)
            except OSError:
                copied += _copy(path, unfinished)
            unfinished.rename(target)
            sync(folder)
        finally:
            unfinished.unlink(missing_ok=True)
    return copied


def problem_in(path: Path, progress: Callable[[int], None]) -> str:
    """Return the reason why a file does not match its name; empty if it matches. ``progress`` gets
    the number of bytes read since the last call."""
    digest = xxhash.xxh3_128()
    try:
        with os.fdopen(ownership.open_own(path), "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                progress(len(piece))
    except (OSError, ownership.OwnershipError) as error:
        return str(error)
    return "" if _fits(path.name, digest) else "it does not hold what was written there"


def _copy(path: Path, target_path: Path) -> int:
    """Copy a file, wait until the copy is on the disk, and return its size in bytes."""
    handle = os.open(target_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as target, open(path, "rb") as source:
        shutil.copyfileobj(source, target, _PIECE_BYTES)
        target.flush()
        os.fsync(handle)
        return target.tell()


def _fits(name: str, digest: xxhash.xxh3_128) -> bool:
    """Return whether the name of a file contains this checksum of its bytes."""
    return digest.hexdigest() == name.rpartition("-")[2]


def _unreadable(path: Path, error: Exception) -> FrozenFileError:
    reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return FrozenFileError(f"frozen weights cannot be read from {path}: {reason}; restore the file")


def _is_whole(path: Path, tensors: NamedTensors) -> bool:
    return _size(path) == size_of(tensors)


def _size(path: Path) -> int:
    """Return the size of a file; -1 if it does not exist. Another host may be writing the file, and
    only an open makes a network file system ask its server."""
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return -1


def _write(path: Path, tensors: NamedTensors, grow: Callable[[bytes], object], wait: Wait) -> None:
    """Write the file unless another process is faster; ``grow`` extends the claim."""
    own_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(own_path, _NEW, 0o600), "wb") as file:
            for piece in _pieces(tensors):
                wait(0)
                if _is_whole(path, tensors):
                    return
                file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                grow(b".")
                failpoints.hit("frozen.write")
        # A faster process has removed the unfinished files of all others.
        with contextlib.suppress(FileNotFoundError):
            own_path.rename(path)
            sync(path.parent)
            for unfinished in path.parent.glob(f".{path.name}.*"):
                unfinished.unlink(missing_ok=True)
    finally:
        own_path.unlink(missing_ok=True)


def _description(tensors: NamedTensors) -> str:
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)}\n" for name, tensor in tensors]
    return xxhash.xxh3_128("".join(lines).encode()).hexdigest()


def _pieces(tensors: NamedTensors) -> Iterator[memoryview]:
    """Yield the bytes of the tensors on the host, in pieces that need little memory."""
    from deadpool_megatron.state.parts import flat_bytes

    for _, tensor in tensors:
        flat = flat_bytes(tensor)
        for start in range(0, flat.numel(), _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES].cpu().numpy().data
