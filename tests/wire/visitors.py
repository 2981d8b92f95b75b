"""A listener and its visitors in tests."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.listener import Listener
from deadpool_megatron.wire.sealed_records import open_stream

SECRET = b"a secret of thirty-two characters"
SECONDS = 20.0
Address = tuple[str, int]


class Recorder:
    """Welcomes each accepted peer, and keeps the reasons for refusals."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.refusals: list[str] = []
        self._changed = asyncio.Event()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        self.served.append(peer)
        self._changed.set()
        writer.write(framing.encode({"t": "welcome"}))
        await reader.read()

    def refuse(self, peer: str, reason: str) -> None:
        del peer
        self.refusals.append(reason)
        self._changed.set()

    async def until(self, ready: Callable[[], Any]) -> None:
        async with asyncio.timeout(SECONDS):
            while not ready():
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def open_door(
    max_pending: int | None = None,
    seconds: float = SECONDS,
    listener: socket.socket | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[tuple[Recorder, Address]]:
    """A listener: its service, and its address."""
    inside, listening = Recorder(), listener or socket.socket()
    listening.bind((host, 0))
    listening.listen(1024)
    door = Listener(listening, SECRET, "run", seconds, inside, max_pending)
    opened = asyncio.create_task(door.run())
    try:
        yield inside, listening.getsockname()
    finally:
        opened.cancel()
        door.close()


async def enter(address: Address, secret: bytes = SECRET) -> asyncio.StreamWriter:
    reader, writer = await open_stream(address)
    try:
        await auth.connect_stream(reader, writer, secret, "run")
        assert await framing.read_frame(reader) == {"t": "welcome"}
    except BaseException:
        writer.close()
        raise
    return writer
