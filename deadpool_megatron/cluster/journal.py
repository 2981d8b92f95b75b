"""Epoch records made durable before anybody hears of them.

A record is written to a temporary file, synced, and *linked* to its final name. Linking either
gives the whole record its name or fails with EEXIST, so that a reader never sees an empty or torn
record, and of two coordinators that decide the same epoch exactly one wins.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"(?P<kind>[a-z]+)-(?P<epoch>\d{8})\.json")


class JournalError(Exception):
    """The journal cannot be written or read; the message names the file."""


class LostRace(JournalError):
    """Another coordinator has decided this epoch; this one must step down."""


class Journal(ABC):
    """Write-once entries named (kind, epoch); kinds used: ``epoch``, ``closed``, ``durable``."""

    @abstractmethod
    def write(self, kind: str, epoch: int, entry: Mapping[str, Any]) -> None:
        """Make the entry durable. Raises LostRace when another one has that name already."""

    @abstractmethod
    def entries(self, kind: str) -> dict[int, dict[str, Any]]:
        """All entries of a kind by epoch, ascending. Raises JournalError for a damaged one."""


class DirectoryJournal(Journal):
    """Journal in a directory of any POSIX file system, NFS included. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, epoch: int, entry: Mapping[str, Any]) -> None:
        """See :class:`Journal`. Raises JournalError when the file system refuses."""
        final = self._directory / f"{kind}-{epoch:08d}.json"
        temporary = self._directory / f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(handle, "w") as file:
                json.dump(entry, file, separators=(",", ":"))
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            self._link(temporary, final)
            self._sync_directory()
        except OSError as error:
            raise JournalError(f"cannot write {final}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def _link(temporary: Path, final: Path) -> None:
        try:
            os.link(temporary, final)
        except OSError as error:
            # An NFS client that repeats a request whose answer was lost reports EEXIST for its own
            # success; two names on the temporary file prove that the link was ours.
            if temporary.stat().st_nlink == 2:
                return
            if isinstance(error, FileExistsError):
                raise LostRace(f"{final} was written by another coordinator") from error
            raise

    def _sync_directory(self) -> None:
        handle = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def entries(self, kind: str) -> dict[int, dict[str, Any]]:
        """See :class:`Journal`."""
        found: dict[int, dict[str, Any]] = {}
        for path in sorted(self._directory.iterdir()):
            if path.name.startswith("."):
                continue  # temporary file of a writer that was killed
            match = _NAME.fullmatch(path.name)
            if match is None:
                raise JournalError(f"{path} does not belong into a journal")
            if match["kind"] == kind:
                found[int(match["epoch"])] = _read(path)
        return found


def _read(path: Path) -> dict[str, Any]:
    try:
        entry = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise JournalError(f"{path} is damaged: {error}") from error
    if not isinstance(entry, dict):
        raise JournalError(f"{path} is damaged: not a JSON object")
    return entry
