"""Operations on file systems that may lack features, be shared, or hang.

A missing feature, such as locks, is not treated as an error. Readers never see a part of a file. A
read has a time limit, and so has the end of a process whose threads wait for a file system.
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
_SHARED_TYPES = re.compile(
    r"nfs\d?|cifs|smb3|9p|lustre|gpfs|beegfs\S*|ceph|afs|wekafs|pvfs2"
    r"|fuse\.(?:juicefs|glusterfs|sshfs|ceph\S*)"
)
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_LOCKS = (*_NOT_OFFERED, errno.ENOLCK)
_NO_LINKS = (*_NOT_OFFERED, errno.EPERM)
# The pause between two attempts to lock a file.
_PAUSE_SECONDS = 0.01
#: mode of files that others may read, if the umask allows it, but never write
WRITTEN_MODE = 0o644
T = TypeVar("T")
#: text on the likely remover of a name that this user's processes still use
LIKELY_CLEANERS = (
    "by RemoveIPC of systemd-logind at the end of a login, an epilog of this site, or a cleaner of"
    " temporary files, it seems"
)


# The identity after a failed creation. That of the removed file must not remain, as a new file may
# have the same inode.
_UNMADE = (-1, -1)


class HeldName:
    """A name that others may remove while it is in use. ``make`` creates the name again."""

    def __init__(self, path: Path, make: Callable[[], object]) -> None:
        self._path, self._make = path, make
        self._last_identity = _identity(path)

    def look(self) -> bool:
        """Create the name again if it is missing or was replaced; return whether this was
        necessary. Raises OSError, and as ``make`` does."""
        if _identity(self._path) == self._last_identity:
            return False
        self._last_identity = _UNMADE
        self._make()
        self._last_identity = _identity(self._path)
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it does not exist."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk. Raises OSError.

    Some file systems, mostly in the network or in user space, flush names by themselves and refuse
    the call for a directory.
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
    types, real = _mount_types(), path.resolve()
    mount = next((path for path in (real, *real.parents) if path in types), real)
    return _SHARED_TYPES.fullmatch(types.get(mount, "")) is not None


def _mount_types() -> dict[Path, str]:
    """Return the type of the file system of each mount point."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return {Path(fields[1].replace("\\040", " ")): fields[2] for fields in mounts}


def lock(handle: int, name: Path, limit_seconds: float = 0.0) -> None:
    """Lock an open file for this process alone. On a file system without locks only print a
    message. Raises BlockingIOError if another process has the lock for longer than the limit."""
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
    """Let an OSError of ``os.link`` name the file, and a missing feature of the file system."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_LINKS:
            error.strerror = (
                f"this file system has no hard links ({error.strerror}), which the files of a run"
                " take: choose another one"
            )
        # The error of a full disk names no file, and that of a link names two files.
        error.filename, error.filename2 = str(name), None
        raise


def write_text(
    path: Path, text: str | bytes, *, lasting: bool = False, mode: int = WRITTEN_MODE
) -> None:
    """Replace ``path`` atomically, by a temporary file that no other user can have created.

    ``lasting``: wait for the disk, so that the new text survives a power failure, which could
    otherwise leave no file or the old text.
    """
    # Each call has a temporary name of its own, as several threads may write.
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
    """Create ``path`` atomically, with its content and permissions; return False if it exists.

    Raises OSError that names ``path``, also if the disk has no space for ``reserved_bytes``.
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
    """A function that reads, called in another thread, at most a single call at a time. For a
    single caller."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._future: Future[T] | None = None

    def look(self, limit_seconds: float) -> T:
        """Return the result of the running read, or of a new read if none is running. Raises the
        error of the read, and TimeoutError if it takes longer than the limit; the read then
        continues, and the next call waits for it.
        """
        if self._future is None:
            self._future = Future()
            threading.Thread(target=self._work, args=(self._future,), daemon=True).start()
        if not wait([self._future], limit_seconds).done:
            raise TimeoutError(f"no answer within {limit_seconds:g} s")
        future, self._future = self._future, None
        return future.result()

    def _work(self, future: Future[T]) -> None:
        try:
            future.set_result(self._read())
        except Exception as error:
            future.set_exception(error)


def run_to_end(main: Coroutine[Any, Any, int], thread_seconds: float) -> int:
    """Run as ``asyncio.run``, but wait for the loop's threads for at most ``thread_seconds`` after
    the end of ``main``. If threads remain, the process exits here with the status of ``main``.
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
