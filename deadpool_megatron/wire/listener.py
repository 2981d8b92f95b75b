"""The listener for connections on an asyncio loop: the handshake, and a limit for pending peers.

A peer is pending until it has proved that it knows the run secret. The kernel holds silent
connections and passes one on when data arrives. At most ``max_pending`` peers are in this process:
a newcomer then waits in the kernel's queue until another peer has authenticated, or is closed
because its time is over: the oldest of the address with most peers. In this way all real agents get
in, one after the other, and a host that opens thousands of connections can take neither all
descriptors nor the place of others for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from deadpool_megatron.wire.auth import accept_stream
from deadpool_megatron.wire.framing import ConnectionClosed, WireError
from deadpool_megatron.wire.sealed_records import RecordReader, wrap_accepted

# At the limit a peer has at least this time for its first message, and for the whole handshake,
# which takes milliseconds where both sides are not busy.
_GREETING_SECONDS = 0.2
_HANDSHAKE_SECONDS = 1.0
# Afterwards this process reads once more, as it may have been busy itself all the time. All peers
# whose time is over share this pause: with a pause for each, a few hundred that come again as soon
# as they are closed would keep all others out.
_LAST_CALL_SECONDS = 0.05
_PAUSE_SECONDS = 0.1
# As many as a busy process can handle in the time that a peer has at the limit.
_MAX_PENDING = 256


class Service(Protocol):
    """The users of accepted connections."""

    async def serve(self, reader: RecordReader, writer: asyncio.StreamWriter, peer: str) -> None:
        """Serve an authenticated connection until its end."""

    def refuse(self, peer: str, reason: str) -> None:
        """Note that a peer was not accepted."""


@dataclass(eq=False)
class _Pending:
    source: str
    port: int
    since: float
    has_greeted: bool = False
    was_called: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"{self.source}:{self.port}"

    def greeted(self) -> None:
        """Note a valid first message: it has another limit, and another last call."""
        self.has_greeted, self.was_called = True, False

    @property
    def expires(self) -> float:
        """The time until which it may stay at the limit."""
        return self.since + (_HANDSHAKE_SECONDS if self.has_greeted else _GREETING_SECONDS)


class Listener:
    """A listener of a single loop, which owns its socket; ``seconds``: limit for a handshake."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        run_id: str,
        seconds: float,
        service: Service,
        max_pending: int | None = None,
    ) -> None:
        self._listener = listener
        self._secret, self._run_id, self._seconds = secret, run_id, seconds
        defer_accept(listener, seconds)
        self._service = service
        self._max_pending = max_pending or _quarter_of_descriptors()
        self._pending: dict[_Pending, None] = {}  # in order of arrival
        self._fewer = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept for ever. Accepted connections outlive a cancellation."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            await self._await_capacity()
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor left, or the peer has gone already
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            pending = _Pending(str(address[0]), int(address[1]), time.monotonic())
            self._pending[pending] = None
            pending.task = loop.create_task(self._admit(connection, pending))
            self._tasks.add(pending.task)
            pending.task.add_done_callback(self._tasks.discard)
            # Waiting connections arrive without a pause, and accepted peers must be read meanwhile,
            # as they would be closed when their time is over.
            await asyncio.sleep(0)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    async def _await_capacity(self) -> None:
        while len(self._pending) >= self._max_pending:
            first, now = self._first_to_expire(), time.monotonic()
            left = first.expires - now
            if left <= 0 and not first.was_called:
                for pending in self._pending:
                    pending.was_called |= pending.expires <= now
                # To its end, even if a peer leaves meanwhile: it is the time of all others, too.
                await asyncio.sleep(_LAST_CALL_SECONDS)
                continue
            if left <= 0:
                del self._pending[first]
                assert first.task is not None
                first.task.cancel()
                reason = "too many unauthenticated peers at once: this connection is closed"
                self._service.refuse(first.name, reason)
                return
            self._fewer.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fewer.wait(), left)

    def _first_to_expire(self) -> _Pending:
        """Return the peer that expires first among those of the address with most peers."""
        counts = Counter(pending.source for pending in self._pending)
        largest = max(counts.values())
        candidates = (peer for peer in self._pending if counts[peer.source] == largest)
        return min(candidates, key=lambda peer: peer.expires)

    async def _admit(self, connection: socket.socket, pending: _Pending) -> None:
        """Serve a connection from accept to its end."""
        peer, writer = pending.name, None
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    connection.setblocking(False)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    reader, writer = await wrap_accepted(connection)
                    await accept_stream(reader, writer, self._secret, self._run_id, pending.greeted)
            except TimeoutError:
                limit = f"{self._seconds:g} s"
                self._service.refuse(peer, f"no complete greeting within {limit}")
                return
            except WireError as error:
                # A standby connects to learn whether a process listens, as do scanners of ports.
                if type(error) is not ConnectionClosed:
                    self._service.refuse(peer, f"{type(error).__name__}: {error}")
                return
            except OSError:
                return  # a reset by the peer, or its host is gone
            finally:
                self._pending.pop(pending, None)
                self._fewer.set()
            await self._service.serve(reader, writer, peer)
        finally:
            (writer or connection).close()


def defer_accept(listener: socket.socket, seconds: float) -> None:
    """Have the kernel hold silent connections of this listener for about that time."""
    with contextlib.suppress(OSError):  # not TCP
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, max(1, round(seconds)))


def _quarter_of_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(soft // 4, _MAX_PENDING))
