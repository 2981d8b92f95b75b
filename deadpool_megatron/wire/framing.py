"""Length-prefixed JSON frames over a stream socket, for blocking sockets and for asyncio.

Frame: magic ``DPM4`` (4 bytes), length of the body (4 bytes, big endian), body: a JSON object
(UTF-8), compressed if it is long. The magic changes with the form of frames and records, so that
versions notice each other. Bulk bytes follow a frame outside of it; its ``nbytes`` is their number
(see vault/).

Waits for a descriptor use poll(): ``select.select`` refuses numbers above 1023, and a training
process has more: data files, loaders, and some sockets for each peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import select
import socket
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

MAGIC = b"DPM4"
_HEADER = struct.Struct(">4sI")
HEADER_BYTES = _HEADER.size
MAXIMUM_FRAME_BYTES = 32 << 20
_COMPRESSED_FROM_BYTES = 16 << 10
_COMPRESSED = b"x"  # how zlib begins, and JSON never does
# That many keys, with their values, take a few milliseconds.
_KEYS_AT_ONCE = 256
# An object of at most that many keys may hold large objects.
_FEW_KEYS = 32
# On, for zero seconds: closing the socket sends a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


class WireError(Exception):
    """The peer sent something that is not a frame of ours; the connection must be closed."""


class OtherVersion(WireError):
    """The peer is a deadpool whose frames have another form."""


class ConnectionClosed(WireError):
    """The peer closed the connection at a frame boundary (or died)."""


class ConnectionCut(ConnectionClosed):
    """The connection ended in the middle of a frame."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the frame of a message. Raises WireError when it is over the size limit."""
    return frame(json.dumps(message, separators=(",", ":")))


def frame(text: str) -> bytes:
    """Return the frame of a JSON text. Raises WireError when it is over the size limit."""
    body = text.encode()
    if len(body) > MAXIMUM_FRAME_BYTES:
        raise WireError(f"message of {len(body)} bytes is over {MAXIMUM_FRAME_BYTES}")
    if len(body) >= _COMPRESSED_FROM_BYTES:
        body = zlib.compress(body, 1)
    return _HEADER.pack(MAGIC, len(body)) + body


def dumps_in_parts(values: Mapping[str, Any]) -> str:
    """Return the text of json.dumps() without white space, made in parts.

    The encoder of the standard library holds the interpreter until its end, a tenth of a second for
    a record of 32,768 roles.
    """
    if len(values) <= _FEW_KEYS:
        parts = [
            f"{json.dumps(key)}:{dumps_in_parts(v) if isinstance(v, Mapping) else _short(v)}"
            for key, v in values.items()
        ]
    else:
        entries = iter(values.items())
        pieces = iter(lambda: dict(itertools.islice(entries, _KEYS_AT_ONCE)), {})
        parts = [_short(piece)[1:-1] for piece in pieces]
    return "{" + ",".join(parts) + "}"


def _short(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def decode_header(header: bytes, limit_bytes: int = MAXIMUM_FRAME_BYTES) -> int:
    """Return the length of the body. Raises OtherVersion, or WireError for bytes of another program
    and for an oversized frame.
    """
    magic, length = _HEADER.unpack(header)
    if magic != MAGIC:
        if magic[:3] == MAGIC[:3]:
            versions = f"{magic.decode(errors='replace')!r}, this one {MAGIC.decode()!r}"
            raise OtherVersion(f"the other end speaks {versions}: install one version on all nodes")
        raise WireError(f"not a deadpool frame: starts with {magic!r}")
    if length > limit_bytes:
        raise WireError(f"frame of {length} bytes is over {limit_bytes}")
    return int(length)


def decode_body(body: bytes, limit_bytes: int = MAXIMUM_FRAME_BYTES) -> dict[str, Any]:
    """Return the JSON object of a frame. Raises WireError for anything else."""
    try:
        if body.startswith(_COMPRESSED):
            unpacker = zlib.decompressobj()
            body = unpacker.decompress(body, limit_bytes)
            if not unpacker.eof:
                raise WireError(f"frame is cut, or unpacks to more than {limit_bytes} bytes")
        message = json.loads(body)
    except (ValueError, RecursionError, zlib.error) as error:
        raise WireError(f"frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError("frame is not a JSON object")
    return message


class FrameBuffer:
    """A buffer that cuts frames out of bytes that arrive in pieces; for non-blocking readers."""

    def __init__(self, limit_bytes: int = MAXIMUM_FRAME_BYTES) -> None:
        self._bytes = bytearray()
        self._limit_bytes = limit_bytes

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """Return all frames completed by this piece, in order. Raises WireError for garbage."""
        self._bytes += piece
        messages = []
        while len(self._bytes) >= HEADER_BYTES:
            length = decode_header(bytes(self._bytes[:HEADER_BYTES]), self._limit_bytes)
            end = HEADER_BYTES + length
            if len(self._bytes) < end:
                break
            messages.append(decode_body(bytes(self._bytes[HEADER_BYTES:end]), self._limit_bytes))
            del self._bytes[:end]
        return messages


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one frame; blocks up to the socket's own timeout."""
    connection.sendall(encode(message))


def send_some(connection: socket.socket, unsent: bytearray) -> None:
    """Send as much of ``unsent`` as the socket takes without waiting, and remove it there. All of
    it is dropped when the other end is gone, as the reader will see the end of the stream."""
    try:
        while unsent:
            del unsent[: connection.send(unsent)]
    except BlockingIOError:
        pass
    except OSError:
        unsent.clear()


def receive(connection: socket.socket, limit_bytes: int = MAXIMUM_FRAME_BYTES) -> dict[str, Any]:
    """Receive one frame; blocks up to the socket's own timeout (TimeoutError).

    Raises ConnectionClosed at end of stream and WireError for garbage.
    """
    length = decode_header(_receive_exactly(connection, HEADER_BYTES), limit_bytes)
    return decode_body(_receive_exactly(connection, length), limit_bytes)


def receive_into(
    connection: socket.socket,
    target: memoryview,
    taken: Callable[[memoryview], object] = lambda piece: None,
) -> None:
    """Fill ``target`` with the bulk bytes that follow a frame. ``taken`` gets each arriving piece
    of it while that is in the processor's cache.
    """
    filled = 0
    while filled < len(target):
        count = connection.recv_into(target[filled:])
        if count == 0:
            raise ConnectionClosed(f"connection closed {len(target) - filled} bytes early")
        taken(target[filled : filled + count])
        filled += count


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    target = bytearray(count)
    receive_into(connection, memoryview(target))
    return bytes(target)


async def read_frame(
    reader: asyncio.StreamReader, limit_bytes: int = MAXIMUM_FRAME_BYTES
) -> dict[str, Any]:
    """Receive one frame from an asyncio stream; same errors as :func:`receive`."""
    try:
        header = await reader.readexactly(HEADER_BYTES)
    except asyncio.IncompleteReadError as error:
        kind = ConnectionCut if error.partial else ConnectionClosed
        raise kind("connection closed") from error
    length = decode_header(header, limit_bytes)
    try:
        return decode_body(await reader.readexactly(length), limit_bytes)
    except asyncio.IncompleteReadError as error:
        raise ConnectionCut("connection closed") from error


def readable(descriptor: int, seconds: float) -> bool:
    """Wait until there is something to read, or the other end is gone; False after ``seconds``."""
    return _ready(descriptor, select.POLLIN, seconds)


def writable(descriptor: int, seconds: float) -> bool:
    """Wait until something can be written, or the other end is gone; False after ``seconds``."""
    return _ready(descriptor, select.POLLOUT, seconds)


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    # Rounded up: a wait of less than a millisecond must not become a busy loop.
    return bool(poll.poll(math.ceil(1000 * max(0.0, seconds))))


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a broken path would: unsent bytes are lost, and the other end sees a
    reset, while the end of this process would look like an orderly close.
    """
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # closed already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
