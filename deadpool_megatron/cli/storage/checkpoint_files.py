"""Is a torch_dist checkpoint whole? Its index can be read, all files and byte ranges are there, and
the checksums of the archives that torch writes match.

Needs torch for the classes of the index; nothing else of a pickle is let in. What torch adds to it
besides, as the plans of all ranks, is passed over; of what is not known here nothing is said.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any, BinaryIO

from deadpool_megatron.vault.shm.verify import Finding, Progress, Verdict

METADATA = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
# Whole names, looked up in the module itself: with a dot in it, a name would reach whatever the
# module has imported.
_ALLOWED = {
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "slice"),
}
_CONSTANTS = ("dtype", "layout", "memory_format")  # of torch itself, told by their type


def checkpoint_bytes(directory: Path) -> int:
    """About how much :func:`verify_checkpoint` will read."""
    found = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pruned just now
            found += path.stat().st_size if path.is_file() else 0
    return found


def verify_checkpoint(directory: Path, progress: Progress) -> Iterator[Finding]:
    """A finding for each file; ``progress`` gets the bytes read since the last call.

    Nothing more once the directory is gone: a run that is alive prunes.
    """
    for finding in _findings(directory, progress):
        if finding.verdict is Verdict.BAD and not directory.is_dir():
            return
        yield finding


def _findings(directory: Path, progress: Progress) -> Iterator[Finding]:
    unknown, verdict = set[str](), Verdict.BAD
    try:
        index = _index(directory, unknown)
        ranges = _ranges(index)
        size = (directory / METADATA).stat().st_size
    except (OSError, pickle.UnpicklingError, ValueError, TypeError, AttributeError) as error:
        ranges, size, what, reason = {}, 0, "index", f"cannot be read: {error}"
    except Exception as error:  # what a parser makes of damaged bytes cannot be listed
        ranges, size, what, reason = {}, 0, "index", f"is damaged: {error!r}"
    else:
        what, reason = f"index of {sum(map(len, ranges.values()))} entries", ""
        verdict = Verdict.GOOD
    if unknown:
        verdict, reason = Verdict.UNKNOWN, f"holds {', '.join(sorted(unknown))}: not known here"
    yield Finding(directory / METADATA, what, size, verdict, reason)
    if what == "index":
        return
    for name, found in sorted(ranges.items()):
        if "/" in name:  # it would lead out of the checkpoint
            yield Finding(directory / name, "entries", 0, Verdict.BAD, "is no name of a file in it")
            continue
        yield _verify_file(directory / name, found, progress)
    # What Megatron adds to those of torch. From 0.19 on the common values are in the index.
    common, configuration = directory / "common.pt", directory / "metadata.json"
    is_in_index = any(str(key).startswith("common_state/") for key in index.state_dict_metadata)
    if common.exists() or (configuration.exists() and not is_in_index):
        yield _verify_file(common, None, progress)
    if common.exists() or configuration.exists() or is_in_index:
        yield _verify_configuration(configuration)


def _index(directory: Path, unknown: set[str]) -> Any:
    """``unknown`` gets the names of what is in it that is not known here."""
    with _opened(directory / METADATA) as file:
        return _IndexReader(file, unknown).load()


def _opened(path: Path) -> BinaryIO:
    """Whatever has the name: a pipe, which nobody writes, is empty."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _ranges(index: Any) -> dict[str, list[tuple[int, int]]]:
    """File -> (offset, length) of every entry of the index."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for info in index.storage_data.values():
        ranges.setdefault(str(info.relative_path), []).append((int(info.offset), int(info.length)))
    return ranges


class _IndexReader(pickle.Unpickler):
    """Lets in the classes that an index consists of, so that a file cannot run code here; all else
    is a stand-in."""

    def __init__(self, file: BinaryIO, unknown: set[str]) -> None:
        super().__init__(file)
        self._unknown = unknown

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # so Python 3.13 names the module of its paths
            module = "pathlib"
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and "." not in name:
            found = super().find_class(module, name)
            if type(found).__name__ in _CONSTANTS:
                return found
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if not f"{module}.".startswith(f"{_CHECKPOINT}."):
            self._unknown.add(f"{module}.{name}")
        return _StandIn


class _StandIn:
    """In the place of an object that is not looked at: takes everything, and is nothing."""

    def __new__(cls, *_: object, **__: object) -> _StandIn:
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        pass

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def extend(self, _: object) -> None:
        """As a list; to append is to extend by one."""

    append = extend


def _enum_member(owner: object, name: str) -> object:
    """Stand for ``getattr(cls, name)``, as some of Python 3.11 write a member of an enum."""
    if owner is _StandIn:
        return _StandIn()
    if isinstance(owner, EnumMeta) and name in owner.__members__:
        found: Enum = owner[name]
        return found
    raise pickle.UnpicklingError(f"{name!r} of {owner!r} has no place in it")


def _verify_file(path: Path, ranges: list[tuple[int, int]] | None, progress: Progress) -> Finding:
    """``ranges``: of the archives in it; None for a file that is one."""
    what = "1 entry" if ranges is None else f"{len(ranges)} entries"
    try:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            for offset, length in sorted([(0, size)] if ranges is None else ranges):
                if offset < 0 or length < 0 or offset + length > size:
                    reason = f"has {size} bytes, an entry lies at {offset} + {length}"
                    return Finding(path, what, size, Verdict.BAD, reason)
                if reason := _damage(_Slice(file, offset, length), is_archive=ranges is None):
                    text = f"entry at {offset} + {length}: {reason}"
                    return Finding(path, what, size, Verdict.BAD, text)
                progress(length)
    except OSError as error:
        return Finding(path, what, 0, Verdict.BAD, error.strerror or str(error))
    return Finding(path, what, size, Verdict.GOOD)


def _verify_configuration(path: Path) -> Finding:
    """Without it Megatron takes the directory for no checkpoint of this format."""
    try:
        with _opened(path) as file:
            values = json.load(file)
        reason = "" if "sharded_backend" in values else "does not say how it is to be read"
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"cannot be read: {error}"
    verdict = Verdict.BAD if reason else Verdict.GOOD
    return Finding(path, "format", 0, verdict, reason)


def _damage(entry: _Slice, *, is_archive: bool) -> str:
    """Return why an entry cannot be used; torch writes each as an archive with a CRC of every
    record."""
    head = entry.read(4)
    if head != b"PK\x03\x04":
        if is_archive or (head and not head.strip(b"\0")):
            return "is no archive of torch" if head.strip(b"\0") else "is empty"
        return ""  # another way to write; that its bytes are there is all that can be said
    entry.seek(0)
    try:
        with zipfile.ZipFile(entry) as archive:
            broken = archive.testzip()
    except OSError:
        raise  # of the file, not of what is in it
    except Exception as error:  # what a parser makes of damaged bytes cannot be listed
        return str(error) or repr(error)
    return f"CRC of {broken} does not match" if broken else ""


class _Slice(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset} before the beginning")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._offset + self._position)
        data = bytes(self._file.read(left if size < 0 else min(size, left)))
        self._position += len(data)
        return data
