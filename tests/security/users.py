"""A victim and an attacker: functions run under other user ids, in a directory both can reach.

Only root can become another user, so these tests are skipped for other users.
"""

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VICTIM, ATTACKER = 65533, 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_user(uid: int | None, function: Callable[[], object]) -> str:
    """Return as text what ``function`` returns in a process of that user (None: of this user).
    Fails if it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            os.environ["HOME"] = "/"
            os.write(writing, str(function()).encode())
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, text
    return text


@contextmanager
def common_directory() -> Iterator[Path]:
    """Yield a directory in which all users may make files and remove their own, like /tmp."""
    path = Path(tempfile.mkdtemp(prefix="deadpool-test-"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def given_to(uid: int, path: Path) -> Path:
    """Give the path and all below it to that user."""
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid, follow_symlinks=False)
    return path
