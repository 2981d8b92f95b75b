"""Cuts the connections of one gloo device from another thread.

Gloo has no abort. A gloo device registers all its sockets with one epoll descriptor, and the kernel
lists them in /proc/self/fdinfo; ``shutdown(2)`` on each ends most pending operations within
milliseconds. Linux only.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

_REGISTERED = re.compile(r"^tfd:\s+(\d+)\s.*?\bino:([0-9a-f]+)", re.MULTILINE)
_SO_ACCEPTCONN = socket.SO_ACCEPTCONN
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def listening_epolls() -> dict[int, set[int]]:
    """Epoll descriptors of this process -> inodes of the listening sockets registered with each.

    Every gloo device has such a socket. Its inode identifies the device; a descriptor's number does
    not, for it may be that of a device which was freed a moment ago.
    """
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                epoll = int(entry.name)
                inodes = {os.fstat(s.fileno()).st_ino for s, listens in _sockets(epoll) if listens}
                if inodes:
                    found[epoll] = inodes
        except FileNotFoundError:
            continue
    return found


def connected_sockets(epoll: int) -> int:
    """Number of sockets registered with ``epoll`` that are not listeners."""
    return sum(1 for _, listening in _sockets(epoll) if not listening)


def cut_connections(epoll: int) -> int:
    """Shut down every registered connection; answers how many were met.

    A listener is left alone: shutting it down makes gloo abort the whole process.
    """
    count = 0
    for connection, listening in _sockets(epoll):
        if listening:
            continue
        count += 1
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # not connected yet, or already gone
    return count


def _sockets(epoll: int) -> Iterator[tuple[socket.socket, bool]]:
    """Duplicates of the TCP sockets registered with ``epoll``, closed after their turn.

    Raises OSError for want of descriptors: what cannot be looked at may well be connected.
    """
    try:
        listing = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except FileNotFoundError:
        return
    for number, inode in _REGISTERED.findall(listing):
        try:
            copy = os.dup(int(number))
        except OSError as error:
            if error.errno == errno.EBADF:
                continue  # closed since the listing
            raise
        # The number may have been given to another file since the listing: the inode proves it.
        if os.fstat(copy).st_ino != int(inode, 16):
            os.close(copy)
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with connection:
            if connection.family in _FAMILIES and connection.type == socket.SOCK_STREAM:
                try:
                    listening = bool(connection.getsockopt(socket.SOL_SOCKET, _SO_ACCEPTCONN))
                except OSError:
                    continue
                yield connection, listening
