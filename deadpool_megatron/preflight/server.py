"""The listener of a node: answers probes, and takes the others in while the node conducts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from deadpool_megatron.preflight import stream
from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.framing import WireError

# Of the handshakes of the check; there may be no run yet, and so no run id.
RUN_ID = "check"
PROBE_SECONDS = 10.0
# All nodes of a large cluster may ask at once; more than that are strangers.
_MOST_CONNECTIONS = 4096

# Takes the socket and the join message; answers whether the socket is its own from now on.
OnJoin = Callable[[socket.socket, dict[str, Any]], bool]


def connect(address: tuple[str, int], secret: bytes) -> socket.socket:
    """An authenticated connection to a node of the check. Raises OSError or WireError."""
    return auth.connect(address, secret, RUN_ID, PROBE_SECONDS)


class Server:
    """One thread accepts, one per connection answers. Use as a context manager.

    ``on_join`` may be set and cleared at any time; joining is declined without it.
    """

    def __init__(self, listener: socket.socket, secret: bytes, node: int) -> None:
        self._listener = listener
        self._secret = secret
        self._node = node
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self.on_join: OnJoin | None = None

    def __enter__(self) -> Server:
        threading.Thread(target=self._accept, name="check-accept", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed: the check is over
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="check-serve", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        kept = False
        try:
            connection.settimeout(PROBE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = auth.accept(connection, self._secret, RUN_ID)
            while not kept:
                kept = self._answer(connection, framing.receive(connection))
        except (OSError, WireError):
            pass  # the other end reports what became of its probe
        finally:
            self._room.release()
            if not kept:
                connection.close()

    def _answer(self, connection: socket.socket, message: dict[str, Any]) -> bool:
        """Carry out one request; True when the connection now belongs to somebody else."""
        match message.get("t"):
            case "echo":
                framing.send(connection, {"t": "echo", "node": self._node, "wall": time.time()})
            case "take":
                framing.send(connection, {"t": "taken", "rate": stream.take_bulk(connection)})
            case "give":
                stream.send_bulk(connection)
            case "join":
                on_join = self.on_join
                if on_join is not None:
                    return on_join(connection, message)
                framing.send(connection, {"t": "declined"})
            case other:
                raise WireError(f"unknown request {other!r}")
        return False
