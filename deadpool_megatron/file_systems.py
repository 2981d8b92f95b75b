"""File systems: missing features as opposed to errors, files that are never seen in part, and
operations that hang as long as their file system: a read, and the end of a process whose threads
wait for it.
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
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

#: types of file systems that hosts share
_SHARED = re.compile(
    r"nfs\d?|cifs|smb3|9p|lustre|gpfs|beegfs\S*|ceph|afs|wekafs|pvfs2"
    r"|fuse\.(?:juicefs|glusterfs|sshfs|ceph\S*)"
)
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_LOCKS = (*_NOT_OFFERED, errno.ENOLCK)
_NO_LINKS = (*_NOT_OFFERED, errno.EPERM)
# Between two tries for a lock.
_PAUSE_SECONDS = 0.01
#: readable by others where the umask allows it, but never writable
WRITTEN_MODE = 0o644
T = TypeVar("T")
#: the likely reason of a missing name that this user's processes still hold
LIKELY_CLEANERS = (
    "by RemoveIPC of systemd-logind at the end of a login, an epilog of this site, or a cleaner of"
    " temporary files, it seems"
)


# After a failed creation: a new file may have the inode of the removed file.
_UNMADE = (-1, -1)


class HeldName:
    """A name that others may remove while it is in use. ``make`` creates it (again)."""

    def __init__(self, path: Path, make: Callable[[], object]) -> None:
        self._path, self._make = path, make
        self._known = _identity(path)

    def look(self) -> bool:
        """Create it again if it is missing or replaced; return whether it was. Raises OSError, and
        as ``make`` does."""
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
    """Flush a file, or the names in a directory, to the disk. Raises OSError.

    Some file systems, mostly of the network and of user space, flush names by themselves and refuse
    the call.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_OFFERED or not path.is_dir():
            raise
    finally:
        os.close(handle)


def is_shared(path: Path) -> bool:
    """Return whether ``path`` is on a type of file system that several hosts share."""
    kinds, real = _kinds(), path.resolve()
    place = next((path for path in (real, *real.parents) if path in kinds), real)
    return _SHARED.fullmatch(kinds.get(place, "")) is not None


def _kinds() -> dict[Path, str]:
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return {Path(fields[1].replace("\\040", " ")): fields[2] for fields in mounts}


def lock(handle: int, name: Path, limit_seconds: float = 0.0) -> None:
    """Lock an open file for this process alone; only print a message on a file system without
    locks. Raises BlockingIOError when another process holds it for longer than the limit."""
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
    """Name the file, and the missing feature of the file system, in an OSError of ``os.link``."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_LINKS:
            error.strerror = (
                f"this file system has no hard links ({error.strerror}), which the files of a run"
                " take: choose another one"
            )
        # The error of a full disk names no file, that of a link two.
        error.filename, error.filename2 = str(name), None
        raise


def write_text(
    path: Path, text: str | bytes, *, lasting: bool = False, mode: int = WRITTEN_MODE
) -> None:
    """Replace ``path`` atomically, through a name that no other user can have made.

    ``lasting``: the new text also survives a power failure, which could leave the name without a
    file or with the old text; blocks for the disk.
    """
    # A name for each call, as several threads may write.
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


def write_once(path: Path, content: bytes, mode: int, reserved_bytes: int = 0) -> bool:
    """Create ``path`` with its content, atomically and with its permissions; False if it exists.

    Raises OSError with the name ``path``, also where ``reserved_bytes`` do not fit.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        with linking(path):
            with os.fdopen(handle, "wb") as file:
                file.write(content.ljust(reserved_bytes))
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
    """A read in a thread of its own, one at a time. For a single caller."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._future: Future[T] | None = None

    def look(self, limit_seconds: float) -> T:
        """Return the result of a read that has just ended. Raises its error, and TimeoutError when
        it takes longer; it then continues, for the next call.
        """
        if self._future is None:
            self._future = Future()
            threading.Thread(target=self._work, args=(self._future,), daemon=True).start()
        if not wait([self._future], limit_seconds).done:
            raise TimeoutError(f"no answer within {limit_seconds:g} s")
        ended, self._future = self._future, None
        return ended.result()

    def _work(self, future: Future[T]) -> None:
        try:
            future.set_result(self._read())
        except Exception as error:
            future.set_exception(error)


def run_to_end(main: Coroutine[Any, Any, int], thread_seconds: float) -> int:
    """Run as ``asyncio.run``, but wait for the loop's threads for at most ``thread_seconds`` after
    the end of ``main``: the process then exits here with its status.
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
