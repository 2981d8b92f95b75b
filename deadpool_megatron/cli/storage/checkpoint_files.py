"""Is a torch_dist checkpoint whole? Its index can be read, all files and byte ranges are there, and
the checksums of the archives that torch writes match.

Of the index only names, offsets and lengths are looked at: every class that it names is a stand-in,
so that a file cannot run code here. What is not of torch is told, and so not verified.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from deadpool_megatron.vault.shm.verify import Finding, Progress, Verdict

METADATA = ".metadata"
# Where the classes of an index are from; and what of Python itself it may name.
_KNOWN_MODULES = ("torch", "collections", "pathlib")
_KNOWN_BUILTINS = ("set", "frozenset", "slice", "getattr")


def verify_checkpoint(directory: Path, progress: Progress) -> Iterator[Finding]:
    """A finding for each file; ``progress`` gets the bytes read since the last call.

    Nothing more once the directory is gone: a run that is alive prunes.
    """
    for finding in _findings(directory, progress):
        if finding.verdict is Verdict.BAD and not directory.is_dir():
            return
        yield finding


def _findings(directory: Path, progress: Progress) -> Iterator[Finding]:
    unknown, ranges, size = set[str](), dict[str, list[tuple[int, int]]](), 0
    try:
        with _opened(directory / METADATA) as file:
            index = _IndexReader(file, unknown).load()
            size = os.fstat(file.fileno()).st_size
        is_in_index = any(str(key).startswith("common_state/") for key in index.state_dict_metadata)
        for info in index.storage_data.values():
            found = ranges.setdefault(str(info.relative_path), [])
            found.append((int(info.offset), int(info.length)))
    except Exception as error:  # what a parser makes of damaged bytes cannot be listed
        what, verdict, reason = "index", Verdict.BAD, f"cannot be read: {error!r}"
    else:
        what, verdict = f"index of {sum(map(len, ranges.values()))} entries", Verdict.GOOD
        reason = ""
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
    if common.exists() or (configuration.exists() and not is_in_index):
        yield _verify_file(common, None, progress)
    if common.exists() or configuration.exists() or is_in_index:
        yield _verify_configuration(configuration)


def _opened(path: Path) -> BinaryIO:
    """Whatever has the name: a pipe, which nobody writes, is empty."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


class _IndexReader(pickle.Unpickler):
    """Puts a stand-in in the place of every class and function, whatever it is called."""

    def __init__(self, file: BinaryIO, unknown: set[str]) -> None:
        super().__init__(file)
        self._unknown = unknown

    def find_class(self, module: str, name: str) -> Any:
        known = name in _KNOWN_BUILTINS if module == "builtins" else False
        if not known and module.partition(".")[0] not in _KNOWN_MODULES:
            self._unknown.add(f"{module}.{name}")
        return _StandIn


class _StandIn:
    """An object that takes everything and keeps the attributes that it had."""

    def __new__(cls, *_: object, **__: object) -> _StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def extend(self, _: object) -> None:
        """As a list or a set; to append is to extend by one."""

    append = add = extend


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
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        left = max(0, self._length - self._at)
        count: int = self._file.readinto(memoryview(buffer)[:left])
        self._at += count
        return count
