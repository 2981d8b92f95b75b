"""Probes over an authenticated connection: echo and bulk bytes, for both ends. Blocking sockets.

Every receive is bounded by the socket's own timeout. Bulk bytes go through one TCP connection in
large pieces, as between vaults.
"""

from __future__ import annotations

import socket
import time

from deadpool_megatron.preflight.facts import Clock
from deadpool_megatron.wire import framing, records
from deadpool_megatron.wire.framing import WireError

PIECE_BYTES = 1 << 20
MOST_BYTES = 256 << 20
MOST_SECONDS = 1.0
_ECHOES = 8


class WrongNode(WireError):
    """Another node than the one wanted answers at this address."""


def echo(connection: socket.socket, node: int) -> tuple[float, Clock]:
    """Shortest round trip in seconds, and the clock of the other end by that exchange.

    Raises WrongNode, OSError or WireError. That the shortest of several exchanges bounds the error
    best is an idea of NTP's clock filter (RFC 5905).
    """
    best = float("inf")
    clock = Clock(0.0, float("inf"))
    for _ in range(_ECHOES):
        began, wall = time.monotonic(), time.time()
        framing.send(connection, {"t": "echo"})
        answer = framing.receive(connection)
        trip = time.monotonic() - began
        if answer.get("node") != node:
            raise WrongNode(f"node {answer.get('node')} answers there")
        if trip < best:
            best = trip
            clock = Clock(_number(answer, "wall") - (wall + trip / 2), trip / 2)
    return best, clock


def measure(connection: socket.socket) -> tuple[float, float]:
    """Bytes per second to the other end, and from it. Raises OSError or WireError."""
    framing.send(connection, {"t": "take"})
    send_bulk(connection)
    out = _number(framing.receive(connection), "rate")
    framing.send(connection, {"t": "give"})
    return out, take_bulk(connection)


def send_bulk(connection: socket.socket) -> None:
    """Send for :data:`MOST_SECONDS` or until :data:`MOST_BYTES` are out."""
    piece, sent = bytes(PIECE_BYTES), 0
    limit = time.monotonic() + MOST_SECONDS
    while sent < MOST_BYTES and time.monotonic() < limit:
        framing.send(connection, {"t": "bulk", "nbytes": PIECE_BYTES})
        records.send_bulk(connection, memoryview(piece))
        sent += PIECE_BYTES
    framing.send(connection, {"t": "end"})


def take_bulk(connection: socket.socket) -> float:
    """Receive what :func:`send_bulk` sends; bytes per second from the first byte to the last."""
    room, taken = memoryview(bytearray(PIECE_BYTES)), 0
    message = framing.receive(connection)
    began = time.monotonic()
    while message.get("t") == "bulk":
        nbytes = message.get("nbytes")
        if not isinstance(nbytes, int) or not 0 < nbytes <= PIECE_BYTES:
            raise WireError(f"a piece of {nbytes} bytes")
        taken += nbytes
        if taken > MOST_BYTES:
            raise WireError("more bytes than a measurement has")
        framing.receive_into(connection, room[:nbytes])
        message = framing.receive(connection)
    return taken / max(time.monotonic() - began, 1e-9)


def _number(message: dict[str, object], key: str) -> float:
    value = message.get(key)
    if not isinstance(value, int | float):
        raise WireError(f"no number {key!r} in the answer")
    return float(value)
