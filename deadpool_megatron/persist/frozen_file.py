"""A file with tensors that no iteration changes, written once and named by what is in it.

It holds their bytes one after the other. Its name is made of two checksums (xxh3, 128 bits): of the
names, dtypes and shapes, and of the bytes. So roles with equal tensors share one file, whoever
comes first writes it, and a reader knows that it has what was written.

Who writes it says so by a second file, ``.NAME``, the claim, which gets a byte for each piece that
is on the disk; the others wait while it grows. A claim only saves work: each writer has a half of
its own, ``.NAME.TOKEN``, and whatever gets the name is whole.

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

#: in a state template, the part of a piece that lies in such a file
FROZEN = "frozen"

_PIECE_BYTES = 64 << 20
_LOOK_SECONDS = 0.05
# A claim that does not grow for so long has lost its writer.
_PATIENCE_SECONDS = 10.0
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC

Named = Sequence[tuple[str, "Tensor"]]
# Waits so many seconds; raises where what is under way must be left.
Wait = Callable[[float], None]


class FrozenFileError(Exception):
    """The file is not there or does not hold what its name says; one line."""


def size_of(tensors: Named) -> int:
    """Bytes of the file that holds them."""
    return sum(tensor.nbytes for _, tensor in tensors)


def name_of(tensors: Named, wait: Wait) -> str:
    """The name of the file that holds them. Reads all their bytes; raises what ``wait`` does."""
    digest = xxhash.xxh3_128()
    for piece in _pieces(tensors):
        wait(0)
        digest.update(piece)
    return f"{_description(tensors)}-{digest.hexdigest()}"


def write(folder: Path, name: str, tensors: Named, wait: Wait) -> None:
    """Write the file ``name`` unless it is there, or wait for the process that does.

    Raises OSError, and what ``wait`` does; no half file of this process is left then.
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
            elif now - grown > _PATIENCE_SECONDS:
                claim.unlink(missing_ok=True)
                grown, size = now, -1
            wait(_LOOK_SECONDS)
            continue
        try:
            with os.fdopen(handle, "wb", buffering=0) as claimed:
                _write(path, tensors, claimed.write, wait)
        finally:
            claim.unlink(missing_ok=True)


def read(folder: Path, name: str, tensors: Named, wait: Wait) -> None:
    """Bring what the file holds into the tensors. Raises FrozenFileError, and what ``wait`` does;
    they may then hold anything."""
    import torch

    if name.partition("-")[0] != _description(tensors):
        raise FrozenFileError(f"{folder / name} holds other weights than this model's: their names")
    digest = xxhash.xxh3_128()
    try:
        with os.fdopen(ownership.open_own(folder / name), "rb") as file, torch.no_grad():
            for _, tensor in tensors:
                values = tensor.detach()
                target = (
                    values
                    if values.is_contiguous()
                    else torch.empty_like(values, memory_format=torch.contiguous_format)
                )
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
    """All its bytes, checked. Raises FrozenFileError."""
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
    """Those that have their name, and so are whole."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def bring(source: Path, folder: Path, progress: Callable[[float], None] = lambda _: None) -> int:
    """Have the files of another run in ``folder`` too: as links where both lie in one file system,
    else as copies. Several processes may do so at once. ``progress`` gets the part that is done (0
    to 1) before each file. Returns the bytes copied; raises OSError.
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
    return "" if _fits(path.name, digest) else "it does not hold what was written there"


def _copy(path: Path, half: Path) -> int:
    """On the disk when this returns."""
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
    why = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return FrozenFileError(f"frozen weights cannot be read from {path}: {why}; restore the file")


def _is_whole(path: Path, tensors: Named) -> bool:
    return _size(path) == size_of(tensors)


def _size(path: Path) -> int:
    """Of a file that another host may be writing: only to open it asks a network file system."""
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return -1


def _write(path: Path, tensors: Named, tell: Callable[[bytes], object], wait: Wait) -> None:
    """Unless another one is faster."""
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
                tell(b".")
                failpoints.hit("frozen.write")
        # It is gone when another one was faster, who took away what was left over.
        with contextlib.suppress(FileNotFoundError):
            half.rename(path)
            sync(path.parent)
            for left in path.parent.glob(f".{path.name}.*"):
                left.unlink(missing_ok=True)
    finally:
        half.unlink(missing_ok=True)


def _description(tensors: Named) -> str:
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)}\n" for name, tensor in tensors]
    return xxhash.xxh3_128("".join(lines).encode()).hexdigest()


def _pieces(tensors: Named) -> Iterator[memoryview]:
    """Their bytes on the host, in pieces that take little memory beside a device's."""
    import torch

    for _, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES].cpu().numpy().data
