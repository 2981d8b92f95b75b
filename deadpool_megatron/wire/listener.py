"""Listener for connections on an asyncio loop: the handshake, and a limit for peers that have not
proved yet that they know the run secret: these are pending.

Who says nothing at all stays in the kernel, which hands a connection over when there is something
to read. There are never more than ``most_pending`` on this side of it: a newcomer then waits in the
kernel's queue until one has proved itself, or until one has had its time and is put out: the oldest
of the address that has most of them. So a crowd of real agents gets in, one after the other, and
somebody who opens thousands of connections takes neither all descriptors nor the place of others
for long.
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
from deadpool_megatron.wire.sealed_records import RecordReader, accepted_stream

# In a crowd a pending one has at least so long: for its first message, and for the whole handshake,
# which takes milliseconds where both sides are not busy.
_MUTE_SECONDS = 0.2
_PATIENCE_SECONDS = 1.0
# After it, this process hears once more what has come: it may have been busy itself all the time.
# All whose time is over share it: with one each, a few hundred who come again as soon as they are
# put out would keep everybody out.
_LAST_CALL_SECONDS = 0.05
_PAUSE_SECONDS = 0.1
# As many as a busy process hears out in the time that one has in a crowd.
_MOST_PENDING = 256


class Service(Protocol):
    """The use of connections that have come in."""

    async def serve(self, reader: RecordReader, writer: asyncio.StreamWriter, who: str) -> None:
        """A connection that knows the run secret, until its end."""

    def refuse(self, who: str, why: str) -> None:
        """Somebody was not let in."""


@dataclass(eq=False)
class _Pending:
    source: str
    port: int
    since: float
    has_spoken: bool = False
    was_called: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def who(self) -> str:
        return f"{self.source}:{self.port}"

    def has_said_hello(self) -> None:
        """Its first message was one: it has another limit, and another last call."""
        self.has_spoken, self.was_called = True, False

    @property
    def until(self) -> float:
        """In a crowd it may stay so long."""
        return self.since + (_PATIENCE_SECONDS if self.has_spoken else _MUTE_SECONDS)


class Listener:
    """Used from one loop only. The listening socket belongs to it from now on; ``seconds``: limit
    for a handshake."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        run_id: str,
        seconds: float,
        service: Service,
        most_pending: int | None = None,
    ) -> None:
        self._listener = listener
        self._secret, self._run_id, self._seconds = secret, run_id, seconds
        defer_accept(listener, seconds)
        self._service = service
        self._most_pending = most_pending or _quarter_of_descriptors()
        self._pending: dict[_Pending, None] = {}  # in order of arrival
        self._fewer = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept for ever. Connections that were let in outlive a cancellation."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            await self._make_room()
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor left, for one; or it was gone before it was taken
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            pending = _Pending(str(address[0]), int(address[1]), time.monotonic())
            self._pending[pending] = None
            pending.task = loop.create_task(self._admit(connection, pending))
            self._tasks.add(pending.task)
            pending.task.add_done_callback(self._tasks.discard)
            # A connection that waits is handed over without a pause, one after the other: who is
            # in already could say nothing meanwhile, and would have to go when its time is over.
            await asyncio.sleep(0)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    async def _make_room(self) -> None:
        while len(self._pending) >= self._most_pending:
            first, now = self._next_to_go(), time.monotonic()
            left = first.until - now
            if left <= 0 and not first.was_called:
                for pending in self._pending:
                    pending.was_called |= pending.until <= now
                # To its end, even if one goes meanwhile: it is the time of all the others, too.
                await asyncio.sleep(_LAST_CALL_SECONDS)
                continue
            if left <= 0:
                del self._pending[first]
                assert first.task is not None
                first.task.cancel()
                self._service.refuse(
                    first.who, "too many unauthenticated peers at once: this connection is closed"
                )
                return
            self._fewer.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fewer.wait(), left)

    def _next_to_go(self) -> _Pending:
        """Of the address with most of them, the one whose time is over first."""
        counts = Counter(pending.source for pending in self._pending)
        most = max(counts.values())
        return min(
            (one for one in self._pending if counts[one.source] == most),
            key=lambda one: one.until,
        )

    async def _admit(self, connection: socket.socket, pending: _Pending) -> None:
        """One connection, from accept to its end."""
        who, writer = pending.who, None
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    connection.setblocking(False)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    reader, writer = await accepted_stream(connection)
                    await accept_stream(
                        reader, writer, self._secret, self._run_id, pending.has_said_hello
                    )
            except TimeoutError:
                limit = f"{self._seconds:g} s"
                self._service.refuse(who, f"no complete greeting within {limit}")
                return
            except WireError as error:
                # A standby knocks to learn whether anybody listens, and scanners of ports do.
                if type(error) is not ConnectionClosed:
                    self._service.refuse(who, f"{type(error).__name__}: {error}")
                return
            except OSError:
                return  # a reset: somebody was in a hurry, or its host is gone
            finally:
                self._pending.pop(pending, None)
                self._fewer.set()
            await self._service.serve(reader, writer, who)
        finally:
            if writer is None:
                connection.close()
            else:
                writer.close()


def defer_accept(listener: socket.socket, seconds: float) -> None:
    """Have the kernel keep connections of this listener that say nothing, for about so long."""
    with contextlib.suppress(OSError):  # not TCP
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, max(1, round(seconds)))


def _quarter_of_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(soft // 4, _MOST_PENDING))
