"""Where memory for generations is taken, and the limit on it: of all processes of a node together.

What counts is what the files of the node's directory really occupy, and what is just being put
behind them, asked of the file system under a lock: there is no book to repair, whoever was killed
at whatever moment. The lock is held to look, not while memory is filled: gigabytes take seconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

from deadpool_megatron.vault.errors import NoRoom, VaultError

_LOCK = ".memory.lock"
# Whoever holds the lock looks at a few files; a stopped one never lets go.
_LOCK_SECONDS = 60.0
_PAUSE_SECONDS = 0.005
# A file without memory, as long as the memory that its process is about to take: .booked.PID.ID
_BOOKED = ".booked."
_PIECE_BYTES = 64 << 20
BLOCK_BYTES = 512  # unit of st_blocks, whatever the file system


class Budget:
    """At most ``limit_bytes`` for the files in ``directory``; 0: as much as its file system has.

    Safe for use by any number of threads and processes.
    """

    def __init__(self, directory: Path, limit_bytes: int = 0) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes

    def used_bytes(self) -> int:
        """Memory behind the files, those that are just being made included."""
        return allocated_bytes(self.directory)

    def allocate(self, file: int, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        """Put memory behind (start, count) ranges of an open file now: a full file system must be
        an error here, not SIGBUS later. Raises NoRoom, and has taken nothing beyond the limit.
        """
        if not self.limit_bytes:
            _allocate(file, path, ranges)
            return
        wanted = sum(count for _, count in ranges)
        known = os.fstat(file)
        # Of ranges that have their memory already, from before a restart, nothing is taken.
        wanted = min(wanted, max(0, known.st_size - known.st_blocks * BLOCK_BYTES))
        if wanted:
            with self._booked(wanted, path) as booked:
                for piece in _pieces(ranges):
                    _allocate(file, path, [piece])
                    wanted = max(0, wanted - piece[1])
                    os.truncate(booked, wanted)

    @contextlib.contextmanager
    def _booked(self, wanted: int, path: Path) -> Iterator[Path]:
        """Count memory as taken before it is there."""
        booked = self.directory / f"{_BOOKED}{os.getpid()}.{uuid4().hex}"
        limit = time.monotonic() + _LOCK_SECONDS
        while not self._book(booked, wanted, path, is_last=time.monotonic() > limit):
            time.sleep(_PAUSE_SECONDS)
        try:
            yield booked
        finally:
            booked.unlink(missing_ok=True)

    def _book(self, booked: Path, wanted: int, path: Path, *, is_last: bool) -> bool:
        """False: no room as long as others are about to take theirs, of which a piece may count
        twice. Raises NoRoom if there is none without them, or it ``is_last``."""
        with self._locked():
            if self.used_bytes() + wanted > self.limit_bytes:
                self._remove_unfinished()
            used, others = self.used_bytes(), any(self.directory.glob(f"{_BOOKED}*"))
            if used + wanted <= self.limit_bytes:
                booked.touch(0o600)
                os.truncate(booked, wanted)
                return True
        if others and not is_last:
            return False
        raise NoRoom(
            f"no room for {path.name}: {wanted} bytes needed, {self.limit_bytes - used} of"
            f" {self.limit_bytes} left in {self.directory}: raise --deadpool-memory-gb"
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.directory / _LOCK, flags, 0o600)
        try:
            limit = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(handle):
                if time.monotonic() > limit:
                    raise VaultError(
                        f"waited {_LOCK_SECONDS:g} s for {self.directory / _LOCK}: the process that"
                        " holds it seems to be stopped"
                    )
                time.sleep(_PAUSE_SECONDS)
            yield
        finally:
            os.close(handle)

    def _remove_unfinished(self) -> None:
        """What processes were making, or about to take, when they were killed."""
        making = ((path, path.name.rpartition(".")[2]) for path in self.directory.glob(".*.seg.*"))
        taking = ((path, path.name.split(".")[2]) for path in self.directory.glob(f"{_BOOKED}*"))
        for path, maker in (*making, *taking):
            if maker.isdigit() and not Path("/proc", maker).exists():
                path.unlink(missing_ok=True)


def allocated_bytes(directory: Path) -> int:
    """What the files of a directory occupy, or are about to; those that vanish meanwhile do not
    count."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    known = entry.stat(follow_symlinks=False)
                    is_booked = entry.name.startswith(_BOOKED)
                    total += known.st_size if is_booked else known.st_blocks * BLOCK_BYTES
    return total


def _pieces(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, count in ranges:
        for done in range(0, count, _PIECE_BYTES):
            yield start + done, min(_PIECE_BYTES, count - done)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _allocate(file: int, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
    try:
        for start, count in ranges:
            if count:
                os.posix_fallocate(file, start, count)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        free = os.statvfs(path.parent)
        needed = sum(count for _, count in ranges)
        raise NoRoom(
            f"no room for {path.name}: {needed} bytes needed on {path.parent}"
            f" (shared memory, usually /dev/shm), {free.f_bavail * free.f_frsize} free:"
            " enlarge it (mount -o remount,size=..., docker --shm-size) or use fewer slots"
        ) from error
