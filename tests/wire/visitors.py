"""Who is behind a door in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from deadpool_megatron.wire import framing

SECRET = b"a secret of thirty-two characters"
SECONDS = 20.0


class Recorder:
    """Welcomes everybody who gets in, and keeps what was said about the others."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.refusals: list[str] = []
        self._changed = asyncio.Event()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, who: str
    ) -> None:
        self.served.append(who)
        self._changed.set()
        writer.write(framing.encode({"t": "welcome"}))
        await reader.read()

    def refuse(self, who: str, why: str) -> None:
        del who
        self.refusals.append(why)
        self._changed.set()

    async def until(self, ready: Callable[[], Any]) -> None:
        async with asyncio.timeout(SECONDS):
            while not ready():
                self._changed.clear()
                await self._changed.wait()
