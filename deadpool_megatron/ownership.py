"""Owners that a file or a directory may have before anything in it is believed.

Its owner is this process's user, or root, and nobody else may write to it. What a run directory
says is carried out: its command is run, its settings name hosts that get passwords, its listings
name processes to kill. So every command asks here first. The names in shared memory can be
guessed, and other users of the host can make them first: such a directory has to be ours alone.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from deadpool_megatron import UserError

# Colon-separated absolute directories. What lies there is believed whoever owns it: storage that
# shows files under other numbers, or a directory that a group shares on purpose.
TRUSTED = "DEADPOOL_TRUSTED_DIRECTORIES"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
# What a container shows as the owner of everything whose owner it does not know, root's included.
_NOBODY_KNOWN = 65534


class OwnershipError(UserError):
    """Somebody else could have put it there; one clear line."""


def check_directory(path: Path) -> None:
    """Raises OwnershipError for a directory that others own or may write to; one that is not there
    is nobody's.

    A link is followed if it belongs to us or root: it says no more than the user who typed it.
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
            f" name it in {TRUSTED}"
        )


def danger_above(path: Path) -> str:
    """Return why somebody else could put another directory in place of ``path``, in a line; empty
    where nobody can but this user and root, or where the user trusts it.

    Whoever may write to a directory above it may rename what leads to it, unless the sticky bit is
    set there, as in /tmp. That is no reason to refuse: directories of a team are like that. What
    lies below a directory that nobody else can enter is out of reach.
    """
    if _is_trusted(path):
        return ""
    known = {os.geteuid(), 0, _NOBODY_KNOWN}
    # As it is written, and where it is: a link on the way may lie in a directory of others.
    for way in (path.absolute(), Path(os.path.realpath(path))):
        found = ""
        for directory in way.parents:
            try:
                link, facts = os.lstat(directory), directory.stat()
            except OSError:
                continue  # it is made together with what is in it
            if not {link.st_uid, facts.st_uid} <= known:
                owner = next(uid for uid in (link.st_uid, facts.st_uid) if uid not in known)
                found = f"user {owner}, whose directory {directory} is,"
            elif facts.st_mode & _OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
                found = f"others, who may write to {directory} (chmod +t keeps what is in it),"
            elif not facts.st_mode & _OTHERS_ENTER:
                found = ""
        if found:
            return f"{found} can put another directory in place of {path}"
    return ""


def is_private(path: Path) -> bool:
    """Return whether it is a directory, no link, that belongs to us and that nobody else can
    enter."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return ours and not facts.st_mode & _OTHERS


def is_taken(path: Path) -> bool:
    """Return whether something has this name in which we write nothing: neither private, nor in a
    place that the user trusts."""
    return os.path.lexists(path) and not is_private(path) and not _is_trusted(path)


def make_private(path: Path) -> None:
    """Make a directory of mode 0700 in one that others may write to, or find it as such.

    Raises OwnershipError where something else has the name already, unless the user trusts it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_taken(path):
        raise OwnershipError(
            f"{path} is there already and is not a directory of this user alone (mode 0700): what"
            " is written there could be read or replaced; remove it, or have its owner remove it,"
            f" or name the directory above it in {TRUSTED}"
        )


def check_checkpoint(path: Path) -> None:
    """Raise OwnershipError unless this user or root has made the directory and all that is in it.

    Its index is unpickled by whoever loads it. That a group may write to it is the user's wish: a
    umask of 002 says so.
    """
    for one in (path, *path.rglob("*")):
        facts = os.lstat(one)
        _check_owner(one, facts)
        if stat.S_ISLNK(facts.st_mode) or (facts.st_mode & stat.S_IWOTH and not _is_trusted(one)):
            raise OwnershipError(
                f"{one} is a link, or can be written by everybody: it is not taken for a part of a"
                " checkpoint; write to a directory of this user, and with a umask of 022"
            )


def open_regular(path: Path) -> int:
    """Open a file for reading, whoever owns it; a pipe or a device would never end. Raises OSError.

    For what is only shown.
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
    """A descriptor of a file for reading, judged after it was opened: no link, ours or root's, not
    writable by others; ``secret``: nor readable by them.

    Raises OwnershipError, or OSError when it cannot be opened.
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
            f" {os.geteuid()}: have it in a directory of your own, or name it in {TRUSTED}"
        )


def _is_trusted(path: Path) -> bool:
    named = filter(None, os.environ.get(TRUSTED, "").split(":"))
    # Where it is, not how it is written: ``..`` and links lead out of what was named.
    place = Path(os.path.realpath(path))
    return any(place.is_relative_to(os.path.realpath(name)) for name in named)
