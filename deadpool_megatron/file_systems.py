"""File systems: what one offers, told apart from what fails on one that does; files that are never
seen in part; and things that hang for as long as a file system does: a look at it, and the end of a
process whose threads wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

#: of file systems that hosts share
_SHARED = re.compile(
    r"nfs\d?|cifs|smb3|9p|lustre|gpfs|beegfs\S*|ceph|afs|wekafs|pvfs2"
    r"|fuse\.(?:juicefs|glusterfs|sshfs|ceph\S*)"
)
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_LOCKS = (*_NOT_OFFERED, errno.ENOLCK)
_NO_LINKS = (*_NOT_OFFERED, errno.EPERM)
# Between two tries for a lock.
_PAUSE_SECONDS = 0.01
#: readable by others where the umask lets them, but never theirs to write
WRITTEN_MODE = 0o644
T = TypeVar("T")
#: of names that this user's processes still hold, and that are not there any more
LIKELY_CLEANERS = (
    "by RemoveIPC of systemd-logind at the end of a login, an epilog of this site, or a cleaner of"
    " temporary files, it seems"
)


# Where making it has failed half-way: a new file may have the inode of the one that was removed.
_UNMADE = (-1, -1)


class HeldName:
    """A name that others may clean away while it is in use. ``make`` has it there (again)."""

    def __init__(self, path: Path, make: Callable[[], object]) -> None:
        self._path, self._make = path, make
        self._known = _identity(path)

    def look(self) -> bool:
        """Make it again unless it leads where it did; whether that was so. Raises OSError, and what
        ``make`` raises."""
        if _identity(self._path) == self._known:
            return False
        self._known = _UNMADE
        self._make()
        self._known = _identity(self._path)
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def sync(path: Path) -> None:
    """Have a file or the names in a directory on the disk; some file systems, network and
    user-space ones mostly, do the latter by themselves and refuse to be asked. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_OFFERED or not path.is_dir():
            raise
    finally:
        os.close(handle)


def is_shared(path: Path) -> bool:
    """Return whether ``path`` lies on a file system that several hosts share, by its kind."""
    kinds, real = _kinds(), path.resolve()
    place = next((one for one in (real, *real.parents) if one in kinds), real)
    return _SHARED.fullmatch(kinds.get(place, "")) is not None


def _kinds() -> dict[Path, str]:
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return {Path(words[1].replace("\\040", " ")): words[2] for words in mounts}


def lock(handle: int, name: Path, limit_seconds: float = 0.0) -> None:
    """Lock an open file for this process alone. On a file system without locks this says so, and
    that is all. Raises BlockingIOError when another one has it for longer than the limit."""
    limit = time.monotonic() + limit_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= limit:
                raise
            time.sleep(_PAUSE_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            text = f"{name}: no locks here ({error.strerror}), continues without"
            print(f"deadpool: {text}", file=sys.stderr, flush=True)
            return


@contextlib.contextmanager
def linking(name: Path) -> Iterator[None]:
    """Around ``os.link``: an OSError names the file, and what the file system lacks."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_LINKS:
            error.strerror = (
                f"this file system has no hard links ({error.strerror}), which the files of a run"
                " take: choose another one"
            )
        # That of a full disk names none, that of a link two.
        error.filename, error.filename2 = str(name), None
        raise


def write_text(
    path: Path, text: str | bytes, *, lasting: bool = False, mode: int = WRITTEN_MODE
) -> None:
    """Replace ``path`` so that a reader sees the old or the new text, never a part, through a name
    that nobody can have made. ``lasting``: the new one after a power failure, too, which may leave
    the name on nothing, or on the old one; blocks for the disk."""
    # Of each call its own: several threads may be at it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if lasting:
        sync(path.parent)


def write_once(path: Path, content: bytes, mode: int, room_bytes: int = 0) -> bool:
    """Give ``path`` its content unless it exists; False if it does. Never seen in part, nor with
    other permissions: written aside and linked to its name. Raises OSError, which names ``path``,
    also where there is no room for ``room_bytes``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        with linking(path):
            with os.fdopen(handle, "wb") as file:
                file.write(content.ljust(room_bytes))
                file.flush()
                os.fsync(file.fileno())
                file.truncate(len(content))
            os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


class TimedRead(Generic[T]):
    """Reads in a thread of its own, one reading at a time. For one caller."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._found: list[T] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def look(self, limit_seconds: float) -> T:
        """Returns what a reading found that has just ended. Raises what the reading raised, and
        TimeoutError when it takes longer; it then continues, for the next look.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._thread.join(limit_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {limit_seconds:g} s")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._found.pop()

    def _work(self) -> None:
        try:
            self._found.append(self._read())
        except Exception as error:
            self._error = error


def run_to_end(main: Coroutine[Any, Any, int], thread_seconds: float) -> int:
    """As ``asyncio.run``, which waits for what is under way in the loop's threads, but no longer
    than ``thread_seconds`` after ``main`` is over: the process then ends with its answer, here.
    """
    with asyncio.Runner() as runner:
        status = runner.run(main)
        guard = threading.Timer(thread_seconds, _give_up, (status, thread_seconds))
        guard.daemon = True
        guard.start()
    guard.cancel()
    return status


def _give_up(status: int, seconds: float) -> None:
    text = f"ends without its threads: waited {seconds:g} s for files that they write or remove"
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)
