"""Turns text files into one token file in Megatron's .bin/.idx format, built once and cached."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deadpool_megatron.trainer.config import BadArgumentsError
from deadpool_megatron.trainer.megatron_api import IndexedDatasetBuilder

END_OF_DOCUMENT = 256
PADDING = 257

# Files are cut into documents of at most this many bytes, so that one long file can be shuffled
# and split into training and validation as well as many short ones.
_DOCUMENT_BYTES = 16 << 10
_DEFAULT_CORPUS_BYTES = 8 << 20
_NOT_THE_LIBRARY = ("site-packages", "dist-packages", "__pycache__")
_FORMAT = "1"


class DataError(BadArgumentsError):
    """The training data cannot be used; the message is one line."""


def token_file(paths: Sequence[Path], cache: Path) -> Path:
    """Path prefix of the token file for these texts (``.bin`` and ``.idx``), built if missing.

    Any number of processes may race: whoever renames its complete folder first wins. Raises
    DataError when there is no text in ``paths``.
    """
    files = _expand(paths)
    if not files:
        raise DataError(f"no text files in {', '.join(map(str, paths)) or 'the standard library'}")
    folder = cache / _key(files)
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        _build(files, folder)
    return folder / "text"


def _expand(paths: Sequence[Path]) -> list[Path]:
    if not paths:
        return _standard_library()
    files: list[Path] = []
    for path in paths:
        files += [path] if path.is_file() else sorted(p for p in path.rglob("*") if _is_text(p))
    return files


def _standard_library() -> list[Path]:
    """Python's own source, in a fixed order, as far as it fits into _DEFAULT_CORPUS_BYTES."""
    files: list[Path] = []
    total = 0
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = sorted(name for name in inner if name not in _NOT_THE_LIBRARY)
        for name in sorted(name for name in names if name.endswith(".py")):
            file = Path(folder, name)
            total += file.stat().st_size
            if total > _DEFAULT_CORPUS_BYTES:
                return files
            files.append(file)
    return files


def _is_text(path: Path) -> bool:
    if not path.is_file() or path.name.startswith("."):
        return False
    with path.open("rb") as stream:
        return b"\0" not in stream.read(8192)


def _key(files: Sequence[Path]) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    for file in files:
        facts = file.stat()
        digest.update(f"{file.absolute()}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:24]


def _build(files: Sequence[Path], folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.{socket.gethostname()}.{os.getpid()}")
    # In a container, a process that was killed here may have had the same name and number.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    builder = IndexedDatasetBuilder(str(partial / "text.bin"), dtype=np.uint16)
    for file in files:
        tokens = np.frombuffer(file.read_bytes(), dtype=np.uint8).astype(np.int32)
        tokens = np.append(tokens, np.int32(END_OF_DOCUMENT))
        for start in range(0, len(tokens), _DOCUMENT_BYTES):
            piece = tokens[start : start + _DOCUMENT_BYTES]
            builder.add_document(piece, [len(piece)])
    builder.finalize(str(partial / "text.idx"))
    try:
        partial.rename(folder)
    except OSError:
        # Another process was faster; its folder holds the same bytes.
        shutil.rmtree(partial)
        if not folder.is_dir():
            raise
