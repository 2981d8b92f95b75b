"""The agent's authenticated connection to the coordinator; survives the coordinator's restart.

Everything but beats is numbered, kept until acknowledged, and sent again after a reconnect, so that
a report is never lost between two connections; the coordinator drops what it has seen. Orders need
no numbers: the welcome after each connect says what holds now.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import connect_stream
from deadpool_megatron.wire.framing import WireError

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
# Reports kept while the coordinator is away; far above what a run makes in its restart time.
# With more than this unsent a beat would only say how late it is.
_BEAT_BACKLOG_BYTES = 65536
MAXIMUM_UNACKNOWLEDGED = 200_000


class CoordinatorLost(Exception):
    """No connection for longer than the fence limit: this node must end its members."""


class CoordinatorLink:
    """One task runs :meth:`run`; ``send`` and ``beat`` may be called from any callback of the loop.

    ``address()`` is asked before each attempt (a restarted coordinator may be elsewhere);
    ``join()`` gives the first message; ``on_message`` gets every order, the welcome first.
    """

    def __init__(
        self,
        address: Callable[[], tuple[str, int] | None],
        secret: bytes,
        run_id: str,
        settings: Settings,
        join: Callable[[], Mapping[str, Any]],
        on_message: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._address = address
        self._secret = secret
        self._run_id = run_id
        self._settings = settings
        self._join = join
        self._on_message = on_message
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque(maxlen=MAXIMUM_UNACKNOWLEDGED)

    @property
    def connected(self) -> bool:
        """Whether the welcome of the current connection has arrived."""
        return self._writer is not None

    def send(self, message: Mapping[str, Any]) -> None:
        """Report something; it arrives once, in order, now or after a reconnect."""
        self._number += 1
        data = framing.encode({**message, "n": self._number})
        self._unacknowledged.append((self._number, data))
        if self._writer is not None:
            self._writer.write(data)

    def beat(self, message: Mapping[str, Any]) -> None:
        """Send a sign of life, or nothing while there is no connection."""
        writer = self._writer
        if writer is not None and writer.transport.get_write_buffer_size() < _BEAT_BACKLOG_BYTES:
            writer.write(framing.encode(message))

    async def flush(self, deadline_seconds: float) -> None:
        """Wait until all reports are acknowledged, or the time is over."""
        limit = time.monotonic() + deadline_seconds
        # A beat is what the coordinator answers with the number of the last report.
        self.beat({"t": "beat", "members": {}, "vault": {}})
        while self._unacknowledged and self._writer is not None and time.monotonic() < limit:
            await asyncio.sleep(0.01)

    async def run(self, fence_seconds: float) -> None:
        """Connect, serve, reconnect with growing pauses; returns only by exception.

        Raises CoordinatorLost when there was no connection for ``fence_seconds``, and
        AuthenticationError when the coordinator refuses the run secret.
        """
        pause, lost_at = _FIRST_PAUSE_SECONDS, time.monotonic()
        why = "never reached"
        while True:
            try:
                await self._connect_and_serve()
            except (OSError, TimeoutError, WireError) as error:
                why = str(error) or type(error).__name__
            if self._writer is not None:
                self._writer.close()
                self._writer = None
                pause, lost_at = _FIRST_PAUSE_SECONDS, time.monotonic()
            if time.monotonic() - lost_at > fence_seconds:
                raise CoordinatorLost(f"no coordinator for {fence_seconds:g} s: {why}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    async def _connect_and_serve(self) -> None:
        address = self._address()
        if address is None:
            raise OSError("the coordinator has not said where it listens")
        limit = self._settings.connect_seconds
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), limit)
        try:
            handshake = connect_stream(reader, writer, self._secret, self._run_id)
            await asyncio.wait_for(handshake, limit)
            writer.write(framing.encode(self._join()))
            welcome = await asyncio.wait_for(framing.read_frame(reader), limit)
        except BaseException:
            writer.close()
            raise
        self._writer = writer
        self._acknowledge(int(welcome.get("seen", 0)))
        for _, data in self._unacknowledged:
            writer.write(data)
        self._on_message(welcome)
        # A silent coordinator (its host cut off) shows by missing acknowledgements of beats.
        silence = max(4 * self._settings.node_silence_seconds, self._settings.connect_seconds)
        while True:
            message = await asyncio.wait_for(framing.read_frame(reader), silence)
            if message.get("t") == "ack":
                self._acknowledge(int(message["n"]))
            else:
                self._on_message(message)

    def _acknowledge(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until one of the awaitables ends, cancel the others, raise what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
