"""A file with tensors that no iteration changes, written once and named by what is in it.

It holds their bytes one after the other. Its name is made of two checksums (xxh3, 128 bits): of the
names, dtypes and shapes, and of the bytes. So roles with equal tensors share one file, whoever
comes first writes it, and a reader knows that it has what was written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from deadpool_megatron import failpoints, ownership

#: in a skeleton, the part of a piece that lies in such a file
FROZEN = "frozen"

_PIECE_BYTES = 64 << 20
_LOOK_SECONDS = 0.05
# A file that does not grow for so long has lost its writer.
_PATIENCE_SECONDS = 10.0

Named = Sequence[tuple[str, Tensor]]
# Waits so many seconds; whether what is under way must be left.
Stopped = Callable[[float], bool]


class FrozenFileError(Exception):
    """The file is not there or does not hold what its name says; one line."""


def name_of(tensors: Named) -> str:
    """The name of the file that holds them. Reads all their bytes."""
    digest = xxhash.xxh3_128()
    for piece in _pieces(tensors):
        digest.update(piece)
    return f"{_description(tensors)}-{digest.hexdigest()}"


def write(folder: Path, name: str, tensors: Named, stopped: Stopped) -> bool:
    """Write the file ``name`` unless it is there, or wait for the process that does.

    Answers False when ``stopped`` did, and then leaves no half file. Raises OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, half = folder / name, folder / f".{name}"
    grown, size = time.monotonic(), -1
    while not path.exists():
        with contextlib.suppress(FileExistsError):
            return _write_as(half, path, tensors, stopped)
        with contextlib.suppress(FileNotFoundError):
            if (now := half.stat().st_size) != size:
                grown, size = time.monotonic(), now
        if time.monotonic() - grown > _PATIENCE_SECONDS:
            other = half.with_name(f"{half.name}.{secrets.token_hex(4)}")
            written = _write_as(other, path, tensors, stopped)
            half.unlink(missing_ok=True)
            return written
        if stopped(_LOOK_SECONDS):
            return False
    return True


def read(folder: Path, name: str, tensors: Named) -> None:
    """Bring what the file holds into the tensors. Raises FrozenFileError; they may then hold
    anything."""
    if name.partition("-")[0] != _description(tensors):
        raise FrozenFileError(f"{folder / name} holds other weights than this model's: their names")
    digest = xxhash.xxh3_128()
    try:
        with os.fdopen(ownership.open_own(folder / name), "rb") as file, torch.no_grad():
            for _, tensor in tensors:
                content = bytearray(tensor.nbytes)
                if file.readinto(content) != tensor.nbytes:
                    raise FrozenFileError(f"{folder / name} ends too early")
                digest.update(content)
                if content:
                    values = torch.frombuffer(content, dtype=tensor.dtype)
                    tensor.copy_(values.view(tensor.shape))
            is_over = not file.read(1)
    except (OSError, ownership.OwnershipError) as error:
        raise _unreadable(folder / name, error) from error
    if not is_over or digest.hexdigest() != name.rpartition("-")[2]:
        raise FrozenFileError(f"{folder / name} does not hold what was written there")


def mapped(folder: Path, name: str) -> memoryview:
    """All its bytes, checked. Raises FrozenFileError."""
    try:
        with os.fdopen(ownership.open_own(folder / name), "rb") as file:
            # Private, not read-only: torch warns of tensors in memory that cannot be written.
            found = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
    except (OSError, ValueError, ownership.OwnershipError) as error:
        raise _unreadable(folder / name, error) from error
    if xxhash.xxh3_128(found).hexdigest() != name.rpartition("-")[2]:
        raise FrozenFileError(f"{folder / name} does not hold what was written there")
    return found


def _unreadable(path: Path, error: Exception) -> FrozenFileError:
    why = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return FrozenFileError(f"frozen weights cannot be read from {path}: {why}; put the file back")


def _write_as(half: Path, path: Path, tensors: Named, stopped: Stopped) -> bool:
    handle = os.open(half, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in _pieces(tensors):
                if stopped(0):
                    return False
                file.write(piece)
                failpoints.hit("frozen.write")
            file.flush()
            os.fsync(file.fileno())
        # Another one may have run out of patience and been faster.
        with contextlib.suppress(FileNotFoundError):
            half.rename(path)
        return True
    finally:
        half.unlink(missing_ok=True)


def _description(tensors: Named) -> str:
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)}\n" for name, tensor in tensors]
    return xxhash.xxh3_128("".join(lines).encode()).hexdigest()


def _pieces(tensors: Named) -> Iterator[memoryview]:
    """Their bytes on the host, in pieces that take little memory beside a device's."""
    for _, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES].cpu().numpy().data
