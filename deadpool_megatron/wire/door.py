"""Where connections come in on an asyncio loop: TLS, the handshake, and a limit for strangers.

Who has not proved yet that it knows the run secret is a stranger. There are never more than
``most_strangers`` of them: a newcomer then waits in the kernel's queue until one has proved itself,
or until the oldest has had its time and is put out. So a crowd of real agents gets in, one after
the other, and somebody who opens thousands of connections takes neither all descriptors nor the
place of others for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Protocol

from deadpool_megatron.wire.auth import accept_stream
from deadpool_megatron.wire.framing import ConnectionClosed, WireError
from deadpool_megatron.wire.tls import Tls, accepted_stream

# In a crowd the oldest stranger has at least this long; a handshake takes milliseconds.
_PATIENCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.1


class Visitors(Protocol):
    """Who is behind the door."""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, who: str
    ) -> None:
        """A connection that knows the run secret, until its end."""

    def refuse(self, who: str, why: str) -> None:
        """Somebody was not let in."""


@dataclass(frozen=True)
class Lock:
    """What it takes to get in. ``seconds``: limit for TLS and the handshake together."""

    secret: bytes
    run_id: str
    tls: Tls | None
    seconds: float


@dataclass(eq=False)
class _Stranger:
    who: str
    since: float
    task: asyncio.Task[None] | None = None


class Door:
    """Used from one loop only. The listening socket belongs to the door from now on."""

    def __init__(
        self,
        listener: socket.socket,
        lock: Lock,
        visitors: Visitors,
        most_strangers: int | None = None,
    ) -> None:
        self._listener = listener
        self._lock = lock
        self._visitors = visitors
        self._most_strangers = most_strangers or _quarter_of_descriptors()
        self._strangers: dict[_Stranger, None] = {}  # in order of arrival
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
            stranger = _Stranger(f"{address[0]}:{address[1]}", time.monotonic())
            self._strangers[stranger] = None
            stranger.task = loop.create_task(self._admit(connection, stranger))
            self._tasks.add(stranger.task)
            stranger.task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    async def _make_room(self) -> None:
        while len(self._strangers) >= self._most_strangers:
            oldest = next(iter(self._strangers))
            left = oldest.since + _PATIENCE_SECONDS - time.monotonic()
            if left <= 0:
                del self._strangers[oldest]
                assert oldest.task is not None
                oldest.task.cancel()
                self._visitors.refuse(oldest.who, "too many strangers at once: the oldest goes")
                return
            self._fewer.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fewer.wait(), left)

    async def _admit(self, connection: socket.socket, stranger: _Stranger) -> None:
        """One connection, from accept to its end."""
        who, writer = stranger.who, None
        try:
            try:
                async with asyncio.timeout(self._lock.seconds):
                    connection.setblocking(False)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    reader, writer = await accepted_stream(connection, self._lock.tls)
                    await accept_stream(reader, writer, self._lock.secret, self._lock.run_id)
            except TimeoutError:
                limit = f"{self._lock.seconds:g} s"
                self._visitors.refuse(who, f"no complete greeting within {limit}")
                return
            except WireError as error:
                # A standby knocks to learn whether anybody listens, and scanners of ports do.
                if type(error) is not ConnectionClosed:
                    self._visitors.refuse(who, f"{type(error).__name__}: {error}")
                return
            except OSError as error:
                # Of a handshake of TLS that fails we may see no more than its end. Without TLS it
                # is a reset: somebody was in a hurry, or its host is gone.
                if self._lock.tls is not None:
                    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
                    self._visitors.refuse(who, f"TLS: {reason or 'not completed'}")
                return
            finally:
                self._strangers.pop(stranger, None)
                self._fewer.set()
            await self._visitors.serve(reader, writer, who)
        finally:
            if writer is None:
                connection.close()
            else:
                writer.close()


def _quarter_of_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(soft, 4096) // 4)
