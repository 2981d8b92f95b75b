"""The journal: decisions, made durable before any process receives them.

A record is written to a temporary file, synced, and *linked* to its final name. Linking either
gives the whole record its name or fails with EEXIST. So a reader never sees an empty or torn
record, and of two coordinators that decide the same epoch (or claim the same term) exactly one
wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron import UserError
from deadpool_megatron.cluster.run_directory.directory import DIRECTORY_MODE
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.file_systems import linking, sync
from deadpool_megatron.wire import framing

_NAME = re.compile(r"(?P<kind>[a-z]+)-(?P<number>\d{8})\.json")
# The number in the name of an entry has eight digits. A name of another form would make the whole
# journal unreadable, because a journal with foreign files is not trusted.
MAX_NUMBER = 99_999_999
# Kind of the notes on nodes that were given up.
REMOVED = "gone"
# Kind of the notes on nodes that computed or held wrong numbers, or have a broken device.
QUARANTINED = "wrong"
# Kind of the notes on the possible numbers of model replicas. A note has the number of the epoch
# whose record lacks it.
SIZES = "sizes"
_HEARTBEAT = ".beat"
_HEARTBEAT_BYTES = 64
_RETRY_SECONDS = 0.1


class JournalError(UserError):
    """The journal cannot be written or read; the message names the file."""


class LostRace(JournalError):
    """Another coordinator has decided this epoch; this coordinator must step down."""


class DamagedEntry(JournalError):
    """An entry exists but has no readable content; a retry would not help."""


@contextlib.contextmanager
def _as_journal_error(verb: str, path: Path) -> Iterator[None]:
    """Raise the errors of the file system as a JournalError that names the file."""
    try:
        yield
    except OSError as error:
        raise JournalError(f"cannot {verb} {path}: {error.strerror}") from error


class Journal:
    """Write-once entries named (kind, number), and a heartbeat, in a directory of any POSIX file
    system, NFS included.

    Several threads may write and read different entries at the same time.

    Kinds: ``epoch`` (records), ``term`` (coordinators: a standby that takes over claims the next
    number), ``node`` (ids given to nodes that joined later), ``gone`` (nodes that were given up),
    ``wrong`` (nodes that get no role any more), ``sizes`` (the possible numbers of
    model replicas, which members report after the record), ``request`` (requests of users).
    """

    def __init__(self, directory: Path, check_own: Callable[[], None] = lambda: None) -> None:
        """``check_own()`` raises OSError if the run directory has become another run's. Raises
        JournalError if the journal's directory cannot be created; its parent must exist.
        """
        self._place, self._check_own = directory, check_own
        with _as_journal_error("make", directory):
            directory.mkdir(DIRECTORY_MODE, exist_ok=True)

    @property
    def _directory(self) -> Path:
        """Return the directory, if it still belongs to this run. Raises JournalError if not."""
        try:
            self._check_own()
        except OSError as error:
            raise JournalError(f"{error.filename}: {error.strerror}") from error
        return self._place

    def write(self, kind: str, number: int, entry: Mapping[str, Any]) -> None:
        """Make the entry durable. Raises LostRace if a different entry has that name already, and
        JournalError if the entry may not be durable; then the same entry may be written again.
        """
        final = self._path(kind, number)
        temporary = self._directory / f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            with _as_journal_error("write", final):
                handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                with os.fdopen(handle, "w") as file:
                    file.write(framing.dumps_in_parts(entry) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                self._link(temporary, final, entry)
                sync(self._directory)
        finally:
            with contextlib.suppress(OSError):  # lost with its file system, or never created
                temporary.unlink()

    @staticmethod
    def _link(temporary: Path, final: Path, entry: Mapping[str, Any]) -> None:
        try:
            with linking(final):
                os.link(temporary, final)
        except OSError as error:
            # An NFS client that repeats a request whose answer was lost gets EEXIST although the
            # first request succeeded. If the temporary file has two names, the link was ours.
            if temporary.stat().st_nlink == 2:
                return
            if isinstance(error, FileExistsError):
                if _read(final) == entry:
                    return  # written by an earlier try of ours whose result was unknown
                raise LostRace(f"{final} was written by another coordinator") from error
            raise

    def has(self, kind: str, number: int) -> bool:
        """Return whether an entry exists; the cost does not depend on the number of entries. On
        a network file system, an entry of another host may be missing for some time.
        """
        path = self._path(kind, number)
        with _as_journal_error("read", path), contextlib.suppress(FileNotFoundError):
            path.stat()
            return True
        return False

    def read(self, kind: str, number: int) -> dict[str, Any]:
        """Return an existing entry. Raises JournalError if there is no such entry, and
        DamagedEntry."""
        return _read(self._path(kind, number))

    def _path(self, kind: str, number: int) -> Path:
        return self._directory / f"{kind}-{digits(number)}.json"

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of all entries of a kind, ascending, without reading the entries."""
        found = []
        with _as_journal_error("read", self._place):
            names = [path.name for path in self._directory.iterdir()]
        for name in names:
            if name.startswith("."):
                continue  # the heartbeat, or a temporary file of a writer that was killed
            match = _NAME.fullmatch(name)
            if match is None:
                raise JournalError(f"{self._directory / name} does not belong in a journal")
            if match["kind"] == kind:
                found.append(int(match["number"]))
        return sorted(found)

    def newest(self, kind: str) -> tuple[int, dict[str, Any]] | None:
        """Return the entry of a kind with the highest number, with that number, if there is any."""
        numbers = self.numbers(kind)
        return (numbers[-1], self.read(kind, numbers[-1])) if numbers else None

    def write_heartbeat(self, text: str) -> None:
        """Replace the coordinator's heartbeat (one short line), which need not be durable.

        The file is written in place: an NFS client asks the server for a file's attributes when it
        opens it, but may use the directory entry of a replaced file for a minute.
        """
        with _as_journal_error("write", self._place / _HEARTBEAT):
            handle = os.open(self._directory / _HEARTBEAT, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(handle, text.encode().ljust(_HEARTBEAT_BYTES)[:_HEARTBEAT_BYTES], 0)
            finally:
                os.close(handle)  # an NFS client sends delayed writes here

    def read_heartbeat(self) -> str:
        """Return the newest heartbeat; empty before the first. Readers only look for changes."""
        path = self._directory / _HEARTBEAT
        with _as_journal_error("read", path), contextlib.suppress(FileNotFoundError):
            return path.read_text(errors="replace").strip()
        return ""


def digits(number: int) -> str:
    """Return an entry's number as in its name. Raises JournalError for a number out of range."""
    if not 0 <= number <= MAX_NUMBER:
        raise JournalError(f"an entry has a number between 0 and {MAX_NUMBER}, not {number}")
    return f"{number:08d}"


def note(journal: Journal, kind: str, number: int, entry: Mapping[str, Any]) -> None:
    """Write a note on a node, or on the sizes, for the next coordinator, as the record that will
    contain these facts may come much later.

    A failed write is not retried, as a missing note costs only time: the next coordinator first
    waits in vain for a removed node, and the next audit finds a node with wrong numbers again.
    """
    with contextlib.suppress(JournalError):
        journal.write(kind, number, entry)


def read_notes(
    journal: Journal,
    note: tuple[str, str],
    known: Collection[int],
    default: str,
    on_trouble: Callable[[str], None],
) -> Mapping[int, str]:
    """Return node -> value of its ``note`` (kind and key), for nodes that are not in ``known``. For
    a note that is not understood, call ``on_trouble(text)`` and return ``default``. Raises
    JournalError."""
    (kind, key), values = note, {}
    for node in journal.numbers(kind):
        if node not in known:
            try:
                values[node] = str(journal.read(kind, node)[key])
            except (DamagedEntry, *DAMAGE) as error:
                # The note is of another version, or of a host that died during the write. An error
                # would end this coordinator and all its successors, after each has claimed a term.
                values[node] = default
                cause = f"{type(error).__name__}: {error}"
                on_trouble(
                    f"{kind} node {node}: its note in the journal is not understood: {cause}"
                )
    return values


async def write_with_retries(
    journal: Journal,
    name: tuple[str, int],
    entry: Mapping[str, Any],
    retry_seconds: float,
    on_trouble: Callable[[str], None],
) -> None:
    """Write an entry in another thread, with retries while the journal cannot be reached.

    ``on_trouble(text)`` is called once for equal errors in a row. Raises LostRace, and JournalError
    after ``retry_seconds``.
    """
    loop = asyncio.get_running_loop()
    limit = time.monotonic() + retry_seconds
    last_text = ""
    while True:
        try:
            await loop.run_in_executor(None, journal.write, *name, entry)
        except LostRace:
            raise
        except JournalError as error:
            if time.monotonic() > limit:
                raise
            if str(error) != last_text:
                last_text = str(error)
                on_trouble(last_text)
        else:
            return
        await asyncio.sleep(_RETRY_SECONDS)


def _read(path: Path) -> dict[str, Any]:
    try:
        with _as_journal_error("read", path):
            entry = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedEntry(f"{path} is damaged: {error}") from error
    if not isinstance(entry, dict):
        raise DamagedEntry(f"{path} is damaged: not a JSON object")
    return entry
