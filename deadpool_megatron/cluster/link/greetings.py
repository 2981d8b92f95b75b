"""An agent's way to a coordinator: connections up to their welcome.

A greeting without an answer is not closed, for to a coordinator that has taken it this would look
like the death of the node; another one is sent beside it. Greetings are numbered, and a coordinator
takes none that is older than one it has taken. So once one is welcomed, all older ones can go.

Nor is the first one closed that still waits for its handshake: at a door with a crowd before it
whoever comes again goes to the end of the queue. Others try beside it, one at a time, each for a
short time: the network may have been mended, or the coordinator may be elsewhere by now.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.cluster.link.pacing import answer_seconds
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import connect_stream
from deadpool_megatron.wire.framing import WireError
from deadpool_megatron.wire.tls import contexts, open_stream

Address = tuple[str, int]


@dataclass(frozen=True)
class Session:
    """One authenticated connection whose welcome has arrived. ``joined_at``: when its first message
    was sent.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: Address
    joined_at: float
    welcome: Mapping[str, Any]

    @property
    def term(self) -> int:
        """Of the coordinator at the other end; 0 when it refused."""
        return int(self.welcome.get("term", 0))


@dataclass(eq=False)
class _Greeting:
    """``writer``: once the first message is sent, at ``joined_at``. ``alone_until``: then another
    one may be sent beside one that is not so far yet; None: never.
    """

    number: int
    address: Address
    alone_until: float | None = None
    writer: asyncio.StreamWriter | None = None
    joined_at: float = 0.0
    task: asyncio.Task[Session] = field(init=False)

    def leave(self) -> None:
        """Close the connection, also one whose welcome has arrived."""
        self.task.cancel()
        if self.writer is not None:
            self.writer.close()


class Greetings:
    """Used from the agent's loop. ``join()`` gives the first message."""

    def __init__(
        self, secret: bytes, run_id: str, settings: Settings, join: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._secret = secret
        self._run_id = run_id
        self._settings = settings
        self._join = join
        self._under_way: list[_Greeting] = []  # the oldest first
        self._count = 0
        self._patience_seconds = answer_seconds(settings)
        self.why = "never reached"  # the last one that failed did so
        self.is_urgent = False

    @property
    def tasks(self) -> set[asyncio.Task[Session]]:
        """Of those under way."""
        return {greeting.task for greeting in self._under_way}

    def needs_another(self, address: Address | None) -> bool:
        """Whether the newest one is not answered in time, or has gone to another coordinator than
        the one at ``address``. At most two at a time are on their way to their first message,
        and each that has sent it waits twice as long as the one before: a busy coordinator is not
        helped by a crowd.
        """
        newest = self._under_way[-1]
        has_moved = address not in (None, newest.address)
        if newest.writer is None:
            until = newest.alone_until
            return until is not None and (has_moved or time.monotonic() > until)
        if self.is_urgent or has_moved:
            return True
        return time.monotonic() - newest.joined_at > self._patience_seconds

    def begin(self, address: Address, limit_seconds: float) -> None:
        """Send one more. ``limit_seconds``: for the connection, and for the handshake; the first of
        several keeps its place for longer. The answer to the first message gets its whole time.
        """
        if self._under_way and self._under_way[-1].writer is not None:
            self._patience_seconds *= 2
        self.is_urgent = False
        self._count += 1
        greeting = _Greeting(self._count, address)
        if not self._under_way and limit_seconds < self._settings.connect_seconds:
            greeting.alone_until = time.monotonic() + limit_seconds
            limit_seconds = self._settings.connect_seconds
        greeting.task = asyncio.create_task(self._open(greeting, limit_seconds))
        # It may end when nobody asks it any more.
        greeting.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._under_way.append(greeting)

    def hurry(self) -> None:
        """A connection has ended on which the coordinator may have counted: soon it takes that for
        the death of the node, and whether it has what waits for its answer is not known.
        """
        self.is_urgent = bool(self._under_way) and self._under_way[-1].writer is not None

    def take(self) -> Session | None:
        """Returns the newest connection whose welcome has come, if there is one, and leaves those
        that are of no use beside it. A later one that may have been taken is not among them.
        """
        for greeting in reversed([one for one in self._under_way if one.task.done()]):
            self._under_way.remove(greeting)
            try:
                session = greeting.task.result()
            except (OSError, TimeoutError, WireError) as error:
                self.why = str(error) or type(error).__name__
                if greeting.writer is not None and greeting.number == self._count:
                    self.hurry()
                continue
            later = [one for one in self._under_way if one.number > greeting.number and one.writer]
            self._leave([one for one in self._under_way if one not in later])
            self._under_way, self.is_urgent = later, False
            self._patience_seconds = answer_seconds(self._settings)
            return session
        return None

    def close(self) -> None:
        """Leave all of them."""
        self._leave(self._under_way)
        self._under_way, self.is_urgent = [], False
        self._patience_seconds = answer_seconds(self._settings)

    def _leave(self, greetings: list[_Greeting]) -> None:
        for greeting in greetings:
            greeting.leave()

    async def _open(self, greeting: _Greeting, limit_seconds: float) -> Session:
        tls = contexts(self._settings)
        # Not wait_for: in Python 3.11 a greeting that was left could go on to its first message.
        async with asyncio.timeout(limit_seconds):
            reader, writer = await open_stream(greeting.address, tls)
        try:
            async with asyncio.timeout(limit_seconds):
                await connect_stream(reader, writer, self._secret, self._run_id)
            greeting.writer, greeting.joined_at = writer, time.monotonic()
            writer.write(framing.encode({**self._join(), "greeting": greeting.number}))
            async with asyncio.timeout(self._settings.connect_seconds):
                welcome = await framing.read_frame(reader)
        except BaseException:
            writer.close()
            raise
        return Session(reader, writer, greeting.address, greeting.joined_at, welcome)
