"""Records, which pass behind the handshake, each under a MAC of its own.

Record: four bytes (the highest bit: bulk; the others: length), the bytes, a tag. The keys come out
of the run secret and the nonces of both sides, one for each direction; each record has a number,
which is not sent. So whatever is altered, put in, sent again, left out or moved by somebody on the
way ends the connection before a byte of it is used; of bulk bytes, what is altered by accident.

Frames are proved by keyed BLAKE2b (RFC 7693), which a coordinator of thousands of agents computes
tens of thousands of times a second: HMAC-SHA256 takes five times as long for so few bytes. Of bulk
bytes, the copies of states, a checksum of 128 bits enters the MAC instead of the bytes: its seed
comes out of the keys, and it is never sent itself. It is no MAC: changes that are chosen with care
get past it in up to 0.9 % of tries. A MAC of all bytes would cost what encryption does.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import socket
import struct
from collections.abc import Callable
from typing import Any

import xxhash

from deadpool_megatron.wire import framing

Buffer = bytes | bytearray | memoryview
_HEADER = struct.Struct(">I")
_COUNTED = struct.Struct(">QI")
_TAG_BYTES = 16
_BULK = 1 << 31
_BULK_BYTES = 1 << 20
_MOST_BYTES = framing.MAXIMUM_FRAME_BYTES + framing.HEADER_BYTES
# Of larger ones the digest is kept: the coordinator sends one frame to every agent.
_SHARED_BYTES = 1 << 14
_PIECE_BYTES = 1 << 18


class AlteredError(ConnectionError):
    """Not what the other end has sent: the connection is worth nothing any more."""

    def __init__(self) -> None:
        super().__init__("what arrived was altered on the way")


class Direction:
    """The records of one direction of a connection, in order."""

    def __init__(self, key: bytes) -> None:
        own = hmac.digest(key, b"tag", "sha256")
        self._mac = hashlib.blake2b(key=own, digest_size=_TAG_BYTES)
        self._seed = int.from_bytes(hmac.digest(key, b"bulk", "sha256")[:8], "big")
        self._number = 0

    def tag(self, header: int, data: Buffer) -> bytes:
        """Of the next record."""
        if header & _BULK:
            proved: Buffer = xxhash.xxh3_128_digest(data, self._seed)
        elif len(data) > _SHARED_BYTES:
            proved = _kept_digest(data) if isinstance(data, bytes) else _digest(data)
        else:
            proved = data
        self._number += 1
        mac = self._mac.copy()
        mac.update(_COUNTED.pack(self._number, header))
        mac.update(proved)
        return mac.digest()

    def seal(self, data: bytes) -> bytes:
        """One record with these bytes."""
        return b"".join((_HEADER.pack(len(data)), data, self.tag(len(data), data)))

    def check(
        self, header: int, data: bytes | bytearray | memoryview, tag: bytes | bytearray
    ) -> None:
        """Raises AlteredError unless the tag is that of the next record."""
        if not hmac.compare_digest(self.tag(header, data), tag):
            raise AlteredError


def _digest(data: Buffer) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


_kept_digest = functools.lru_cache(maxsize=1)(_digest)


def _length(header: int) -> int:
    """Of the bytes of a record; no more is taken into memory than a frame may have."""
    length = header & ~_BULK
    if length > (_BULK_BYTES if header & _BULK else _MOST_BYTES):
        raise AlteredError
    return length


class Opener:
    """Takes records out of bytes that arrive in pieces."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """The bytes of all records that are completed. Raises AlteredError."""
        self._bytes += piece
        found, start = [], 0
        while len(self._bytes) - start >= _HEADER.size:
            (header,) = _HEADER.unpack_from(self._bytes, start)
            begin = start + _HEADER.size
            end = begin + _length(header)
            if len(self._bytes) < end + _TAG_BYTES:
                break
            data = bytes(self._bytes[begin:end])
            self._direction.check(header, data, self._bytes[end : end + _TAG_BYTES])
            found.append(data)
            start = end + _TAG_BYTES
        del self._bytes[:start]
        return b"".join(found)

    @property
    def is_between(self) -> bool:
        """Return whether no part of a record is there."""
        return not self._bytes


class RecordSocket(socket.socket):
    """A blocking socket; from :meth:`begin` on in records. One thread at a time per direction."""

    _out: Direction | None = None
    _in: Direction | None = None
    _left = memoryview(b"")

    @staticmethod
    def of(connection: socket.socket) -> RecordSocket:
        """The same connection and time-out; ``connection`` itself is of no use any more."""
        timeout = connection.gettimeout()
        family, kind, protocol = connection.family, connection.type, connection.proto
        wrapped = RecordSocket(family, kind, protocol, fileno=connection.detach())
        wrapped.settimeout(timeout)
        return wrapped

    def begin(self, sending: Direction, receiving: Direction) -> None:
        """The handshake is over."""
        self._out, self._in = sending, receiving

    def sendall(self, data: Any, flags: int = 0) -> None:
        """One record, or more of them."""
        if self._out is None:
            super().sendall(data, flags)
            return
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _MOST_BYTES):
            super().sendall(self._out.seal(bytes(view[start : start + _MOST_BYTES])), flags)

    def send_bulk(self, view: memoryview) -> None:
        """Raw bytes, without copying them."""
        if self._out is None:
            super().sendall(view)
            return
        view = view.cast("B")
        for start in range(0, len(view), _BULK_BYTES):
            piece = view[start : start + _BULK_BYTES]
            header = len(piece) | _BULK
            # First, because then the kernel finds in the cache what it has to copy.
            tag = self._out.tag(header, piece)
            super().sendall(_HEADER.pack(header), socket.MSG_MORE)
            super().sendall(piece, socket.MSG_MORE)
            super().sendall(tag)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Bytes of records that are whole and as they were sent. Raises AlteredError."""
        if self._in is None:
            return super().recv_into(buffer, nbytes, flags)
        target = memoryview(buffer).cast("B")
        target = target[: nbytes or len(target)]
        if not self._left:
            whole = bytearray(_HEADER.size)
            if not self._fill(memoryview(whole), at_boundary=True):
                return 0
            (header,) = _HEADER.unpack(whole)
            length, tag = _length(header), bytearray(_TAG_BYTES)
            fits = length <= len(target)
            data = target[:length] if fits else memoryview(bytearray(length))
            self._fill(data)
            self._fill(memoryview(tag))
            self._in.check(header, data, tag)
            if fits:
                return length
            self._left = data
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def pending(self) -> int:
        """Bytes that have been taken out of a record already: the descriptor knows nothing of
        them."""
        return len(self._left)

    def _fill(self, target: memoryview, *, at_boundary: bool = False) -> bool:
        filled = 0
        while filled < len(target):
            count = super().recv_into(target[filled:])
            if count == 0:
                if at_boundary and not filled:
                    return False
                raise framing.ConnectionCut("connection closed in the middle of a record")
            filled += count
        return True


class RecordReader(asyncio.StreamReader):
    """A stream reader; from :meth:`begin` on it has the bytes of records that are whole and as they
    were sent. What was altered ends it with AlteredError."""

    def __init__(self) -> None:
        super().__init__()
        self._opener: Opener | None = None
        self._take: Callable[[bytes], object] | None = None
        self._end: asyncio.Future[None] | None = None

    def begin(self, receiving: Direction) -> None:
        """The handshake is over; records may have come behind it."""
        self._opener = Opener(receiving)
        if arrived := self._taken_out():
            self.feed_data(arrived)

    async def listen(self, take: Callable[[bytes], object]) -> None:
        """Give everything to ``take`` in the callback of the loop in which it arrives, until the
        connection ends: who has thousands of connections has no turn of a task to spare for each
        message. Raises OSError, and whatever ``take`` raises.
        """
        if (error := self.exception()) is not None:
            raise error
        take(self._taken_out())
        if self.at_eof():
            return
        self._take, self._end = take, asyncio.get_running_loop().create_future()
        await self._end

    def _taken_out(self) -> bytes:
        # The base class has no way to ask for what is there without waiting when there is nothing.
        waiting: bytearray = self._buffer  # type: ignore[attr-defined]
        taken = bytes(waiting)
        waiting.clear()
        self._maybe_resume_transport()  # type: ignore[attr-defined]
        return taken

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        """See asyncio.StreamReader."""
        if self.exception() is not None:
            return
        try:
            opened = data if self._opener is None else self._opener.feed(data)
            if self._take is None:
                super().feed_data(opened)
            else:
                self._take(opened)
        except Exception as error:
            self.set_exception(error)

    def feed_eof(self) -> None:
        """See asyncio.StreamReader."""
        if self._opener is not None and not self._opener.is_between:
            self.set_exception(framing.ConnectionCut("connection closed in the middle of a record"))
        super().feed_eof()
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def set_exception(self, exc: Exception) -> None:
        """See asyncio.StreamReader."""
        super().set_exception(exc)
        if self._end is not None and not self._end.done():
            self._end.set_exception(exc)


class RecordWriter(asyncio.StreamWriter):
    """A stream writer; from :meth:`begin` on each write becomes a record."""

    _sending: Direction | None = None

    def begin(self, sending: Direction) -> None:
        """The handshake is over."""
        self._sending = sending

    def write(self, data: Buffer) -> None:
        """Queue bytes, no more than a frame has."""
        super().write(data if self._sending is None else self._sending.seal(bytes(data)))


async def open_stream(address: tuple[str, int]) -> tuple[RecordReader, RecordWriter]:
    """Connect; the caller bounds the time."""
    loop, (reader, protocol) = asyncio.get_running_loop(), _ends()
    transport, _ = await loop.create_connection(lambda: protocol, *address)
    return reader, RecordWriter(transport, protocol, reader, loop)


async def accepted_stream(connection: socket.socket) -> tuple[RecordReader, RecordWriter]:
    """Streams of a connection just accepted; the caller bounds the time."""
    loop, (reader, protocol) = asyncio.get_running_loop(), _ends()
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
    return reader, RecordWriter(transport, protocol, reader, loop)


def _ends() -> tuple[RecordReader, asyncio.StreamReaderProtocol]:
    reader = RecordReader()
    return reader, asyncio.StreamReaderProtocol(reader)
