"""Checks the owner and the permissions of a file or directory before its content is trusted.

The owner must be this process's user, or root, and no other user may have write access. Commands
act on the content of a run directory: they run its command, send passwords to hosts that its
settings name, and kill processes that its listings name. So every command checks the directory
first. In shared memory, other users of the host can guess names and create them first, so a
directory there must be private.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from deadpool_megatron import UserError

# Variable with directories to trust with any owner: absolute paths, separated by colons. They are
# for storage that shows wrong owners, and for directories that a group shares on purpose.
TRUSTED_VARIABLE = "DEADPOOL_TRUSTED_DIRECTORIES"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
# A container shows this owner for files of users that it does not know, which may include root.
_UNKNOWN_OWNER = 65534


class OwnershipError(UserError):
    """Another user could have written a file or directory; the message is a line."""


def check_directory(path: Path) -> None:
    """Raise OwnershipError if the directory exists, and others own it or may write to it.

    A link is followed if it belongs to this user or root.
    """
    try:
        facts = os.lstat(path)
        if stat.S_ISLNK(facts.st_mode):
            _check_owner(path, facts)
            facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OwnershipError(f"{path} cannot be looked at: {error.strerror}") from error
    _check_owner(path, facts)
    if stat.S_ISDIR(facts.st_mode) and facts.st_mode & _OTHERS_WRITE and not _is_trusted(path):
        raise OwnershipError(
            f"{path} can be written by others, and what it says is carried out: chmod go-w it, or"
            f" name it in {TRUSTED_VARIABLE}"
        )


def danger_above(path: Path) -> str:
    """Return the reason, in a line, why another user could replace the directory ``path``; empty if
    only this user and root could, or if the user trusts the directory.

    A user with write access to a directory above may rename the entries that lead to ``path``,
    unless the sticky bit is set there, as in /tmp. The reason is for a warning and not a refusal,
    as the directories of teams are often like that. No other user reaches anything below a
    directory that only its owner can enter.
    """
    if _is_trusted(path):
        return ""
    trusted_users = {os.geteuid(), 0, _UNKNOWN_OWNER}
    # Check the given and the real path, as a link in the path may be in a directory of others.
    for route in (path.absolute(), Path(os.path.realpath(path))):
        subject = ""
        for directory in route.parents:
            try:
                link, facts = os.lstat(directory), directory.stat()
            except OSError:
                continue  # this process will create the directory
            if not {link.st_uid, facts.st_uid} <= trusted_users:
                owner = next(uid for uid in (link.st_uid, facts.st_uid) if uid not in trusted_users)
                subject = f"user {owner}, whose directory {directory} is,"
            elif facts.st_mode & _OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
                subject = f"others, who may write to {directory} (chmod +t keeps what is in it),"
            elif not facts.st_mode & _OTHERS_ENTER:
                subject = ""
        if subject:
            return f"{subject} can put another directory in place of {path}"
    return ""


def is_private(path: Path) -> bool:
    """Return whether ``path`` is a directory, and no link, of this user that no other user can
    enter."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return is_own and not facts.st_mode & _OTHERS


def is_taken(path: Path) -> bool:
    """Return whether ``path`` exists, and is neither a private directory nor in a trusted
    directory."""
    return os.path.lexists(path) and not is_private(path) and not _is_trusted(path)


def make_private(path: Path) -> None:
    """Make a directory of mode 0700 in a place that others may write to, unless it exists.

    Raises OwnershipError if the name exists, and is neither a private directory nor trusted.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_taken(path):
        raise OwnershipError(
            f"{path} is there already and is not a directory of this user alone (mode 0700): what"
            " is written there could be read or replaced; remove it, or have its owner remove it,"
            f" or name the directory above it in {TRUSTED_VARIABLE}"
        )


def check_checkpoint(path: Path) -> None:
    """Raise OwnershipError unless this user or root owns the directory and all its entries, as the
    load of a checkpoint unpickles its index.

    A group may have write access, as with umask 002.
    """
    for entry in (path, *path.rglob("*")):
        facts = os.lstat(entry)
        _check_owner(entry, facts)
        if stat.S_ISLNK(facts.st_mode) or (facts.st_mode & stat.S_IWOTH and not _is_trusted(entry)):
            raise OwnershipError(
                f"{entry} is a link, or can be written by everybody: it is not taken for a part of"
                " a checkpoint; write to a directory of this user, and with a umask of 022"
            )


def open_regular(path: Path) -> int:
    """Open a regular file of any owner for reading, for content that is only displayed.

    Raises OSError, also for a pipe or a device, which would never end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is not a file", str(path))


def open_own(path: Path, *, secret: bool = False) -> int:
    """Open a file for reading, check it, and return its descriptor.

    The file must belong to this user or root, and must not be a link or writable by others; with
    ``secret`` others must have no access at all. Raises OwnershipError, and OSError if the file
    cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OwnershipError(f"{path} is a link: put the file itself there") from error
        raise
    try:
        facts = os.fstat(handle)
        _check_owner(path, facts)
        if not stat.S_ISREG(facts.st_mode):
            raise OwnershipError(f"{path} is not a file")
        if facts.st_mode & (_OTHERS if secret else _OTHERS_WRITE):
            can = "read" if secret else "written"
            raise OwnershipError(f"{path} can be {can} by others: chmod 600 it")
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check_owner(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0) and not _is_trusted(path):
        raise OwnershipError(
            f"{path} belongs to user {facts.st_uid}, and what it says would be carried out as user"
            f" {os.geteuid()}: have it in a directory of your own, or name it in {TRUSTED_VARIABLE}"
        )


def _is_trusted(path: Path) -> bool:
    trusted = filter(None, os.environ.get(TRUSTED_VARIABLE, "").split(":"))
    # Compare the real path, as ``..`` and links lead out of a directory.
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(name)) for name in trusted)
