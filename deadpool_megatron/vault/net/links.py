"""Connections on the vault's AF_UNIX socket: members and the agent of the own node.

One named thread reads each connection. Sending never waits for the other side, since a stopped
member must not hold up anybody's commit: what the socket does not take at once is kept and sent as
it drains, and a connection with too much kept is cut (its owner connects again).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_megatron.file_systems import HeldName
from deadpool_megatron.vault.errors import MALFORMED, VaultError
from deadpool_megatron.vault.net.transport import begin_thread
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError

log = logging.getLogger(__name__)
_MOST_KEPT_BYTES = 64 << 20
_MESSAGE_SECONDS = 20.0
_BACKLOG = 512


class Link:
    """One local connection. :meth:`send` and :meth:`close` from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(_MESSAGE_SECONDS)
        # A time-out belongs to the Python object: the reader waits, the senders never do.
        self._sender = connection.dup()
        self._sender.settimeout(0)
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._closed = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a frame or keep it for later; on a broken connection do nothing."""
        with self._lock:
            if self._closed:
                return
            self._kept += framing.encode(message)
            self._flush()
            if len(self._kept) > _MOST_KEPT_BYTES:
                log.warning("a local connection does not read: cut")
                self._shutdown()

    def receive(self, stopping: threading.Event) -> dict[str, Any] | None:
        """The next frame, or None when the vault stops. Raises WireError or OSError at the end."""
        while not stopping.is_set():
            with self._lock:
                events = select.POLLIN | (select.POLLOUT if self._kept else 0)
            poll = select.poll()
            poll.register(self._socket, events)
            for _, event in poll.poll(500):
                if event & select.POLLOUT:
                    with self._lock:
                        self._flush()
                if event & ~select.POLLOUT:
                    return framing.receive(self._socket)
        return None

    def close(self) -> None:
        """Cut the connection."""
        with self._lock:
            self._shutdown()
            self._socket.close()
            self._sender.close()

    def _flush(self) -> None:
        try:
            while self._kept:
                count = self._sender.send(self._kept)
                del self._kept[:count]
        except BlockingIOError:
            return
        except OSError:
            self._shutdown()

    def _shutdown(self) -> None:
        self._closed = True
        self._kept.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def listening_at(path: Path) -> socket.socket:
    """A socket of this user's own that listens there, in place of whatever had the name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    return listener


class LinkServer:
    """Accepts local connections and runs ``dialogue(link, stopping)`` for each in a thread."""

    def __init__(
        self, listener: socket.socket, dialogue: Callable[[Link, threading.Event], None]
    ) -> None:
        self._listener = listener
        self._dialogue = dialogue
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._accept, name="accept-local", daemon=True)
        self._path = Path(listener.getsockname())
        self._name = HeldName(self._path, self._listen_again)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def keep_name(self) -> bool:
        """Listen under the same name again if it is gone; whether it was. Raises OSError."""
        return self._name.look()

    def _listen_again(self) -> None:
        self._listener = listening_at(self._path)  # what waits at the old one was accepted before

    def stop(self) -> None:
        """Accept no more; the threads of open connections end within a second."""
        self._stopping.set()
        self._thread.join(timeout=2.0)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            connection: socket.socket | None = None
            try:
                self._listener.settimeout(0.5)
                connection, _ = self._listener.accept()
                link = Link(connection)  # takes a second descriptor
            except TimeoutError:
                continue
            except OSError as error:  # no file descriptor left, for one
                log.warning("accept: %s", error)
                if connection is not None:
                    connection.close()
                self._stopping.wait(0.1)
                continue
            if not begin_thread(f"local-{next(self._numbers)}", partial(self._run, link)):
                link.close()
                self._stopping.wait(0.1)

    def _run(self, link: Link) -> None:
        try:
            self._dialogue(link, self._stopping)
        except framing.ConnectionClosed:
            pass
        except (WireError, VaultError, OSError, *MALFORMED) as error:
            log.warning("%s: %s: %s", threading.current_thread().name, type(error).__name__, error)
        finally:
            link.close()
