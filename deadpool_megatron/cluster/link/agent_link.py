"""The agent's authenticated connection to the coordinator; survives the coordinator's restart.

Everything but beats is numbered, kept until acknowledged, and sent again after a reconnect, so that
a report is never lost between two connections; the coordinator drops what it has seen. Orders come
the same way in the other direction: beats and the first message of a connection acknowledge them,
and what was had already is dropped here. A coordinator that takes over counts its orders anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cluster.link.outbox import Outbox
from deadpool_megatron.cluster.link.pacing import Pace, contact_seconds
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import connect_stream
from deadpool_megatron.wire.framing import WireError
from deadpool_megatron.wire.tls import contexts, open_stream

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
# What a coordinator had taken and not yet written is told to its successor again, and so are the
# newest numbers in any case: it knows of nothing between the newest record and its own beginning.
_RETAINED_SECONDS = 10.0
_RETAINED_REPORTS = 64
# With more than this unsent a beat would only say how late it is.
_BEAT_BACKLOG_BYTES = 65536
# Of reports kept while the coordinator is away; far above what a run makes in its restart time.
_MOST_REPORTS = 200_000
_MOST_REPORT_BYTES = 1 << 30


class CoordinatorLost(Exception):
    """No connection for longer than this node may go on without one."""


@dataclass(frozen=True)
class _Session:
    """One authenticated connection whose welcome has arrived."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: tuple[str, int]
    welcome: Mapping[str, Any]

    @property
    def term(self) -> int:
        """Of the coordinator at the other end; 0 when it refused."""
        return int(self.welcome.get("term", 0))


class CoordinatorLink:
    """One task runs :meth:`run`; ``send`` and ``beat`` may be called from any callback of the loop.

    ``address()`` is asked before each attempt (a new coordinator may be elsewhere); ``join()``
    gives the first message; ``on_message`` gets every order, the welcome first; ``on_heard(at,
    term)`` is told when the newest acknowledged beat (or join) was sent, in monotonic seconds.
    """

    def __init__(
        self,
        address: Callable[[], tuple[str, int] | None],
        secret: bytes,
        run_id: str,
        settings: Settings,
        join: Callable[[], Mapping[str, Any]],
        on_message: Callable[[Mapping[str, Any]], None],
        on_heard: Callable[[float, int], None] = lambda sent_at, term: None,
    ) -> None:
        self._address = address
        self._secret = secret
        self._run_id = run_id
        self._settings = settings
        self._join = join
        self._on_message = on_message
        self._on_heard = on_heard
        self._session: _Session | None = None
        self._heard_at = 0.0
        self._number = 0
        self._pace = Pace(settings.beat_interval_seconds)
        self._unacknowledged = Outbox(_MOST_REPORTS, _MOST_REPORT_BYTES)
        self._retained: deque[tuple[float, int, bytes]] = deque()
        self._boot = ""
        self._ordered = 0  # newest order had of that coordinator
        self._term = 0
        self._refused = False

    @property
    def connected(self) -> bool:
        """Whether the welcome of the current connection has arrived."""
        return self._session is not None

    def send(self, message: Mapping[str, Any], *, retain: bool = False) -> None:
        """Report something; it arrives once, in order, now or after a reconnect. ``retain``: told
        again to a coordinator that takes over soon after; it must do no harm to hear it twice.
        """
        self._number += 1
        data = framing.encode({**message, "n": self._number})
        self._unacknowledged.add(self._number, data)
        if self._unacknowledged.is_over_full:
            self._unacknowledged.drop_oldest()
        if retain:
            now = time.monotonic()
            self._retained.append((now, self._number, data))
            long_ago = now - _RETAINED_SECONDS
            while len(self._retained) > _RETAINED_REPORTS and self._retained[0][0] < long_ago:
                self._retained.popleft()
        if self._session is not None:
            self._session.writer.write(data)

    @property
    def contact_seconds(self) -> float:
        """With an older newest acknowledged beat than this, contact is in doubt."""
        return contact_seconds(self._pace.seconds, self._settings)

    @property
    def beat_is_due(self) -> bool:
        """Whether the time between beats that the coordinator asked for is over; asking starts the
        next one.
        """
        return self._pace.is_due(time.monotonic())

    def beat(self, message: Mapping[str, Any]) -> None:
        """Send a sign of life, or nothing while there is no connection."""
        if self._session is None:
            return
        writer = self._session.writer
        if writer.transport.get_write_buffer_size() < _BEAT_BACKLOG_BYTES:
            writer.write(framing.encode({**message, "b": time.monotonic(), "o": self._ordered}))

    async def flush(self, deadline_seconds: float) -> None:
        """Wait until all reports are acknowledged, or the time is over."""
        limit = time.monotonic() + deadline_seconds
        while self._unacknowledged and time.monotonic() < limit:
            # A beat is what the coordinator answers with the number of the last report.
            self.beat({"t": "beat", "members": {}, "vault": {}})
            await asyncio.sleep(0.05)

    def supersede(self, why: str) -> None:
        """Tell the coordinator to step down: it is to conclude nothing from the end of this
        connection."""
        if self._session is not None:
            self._session.writer.write(framing.encode({"t": "superseded", "why": why}))

    def close(self) -> None:
        """Leave: the coordinator takes it for the end of this node."""
        if self._session is not None:
            self._session.writer.close()
            self._session = None

    async def run(self, patience_seconds: float) -> None:
        """Connect, serve, reconnect with growing pauses; returns only by exception.

        Raises CoordinatorLost when there was no connection for ``patience_seconds``, and
        AuthenticationError when the coordinator refuses the run secret.
        """
        pause, lost_at = _FIRST_PAUSE_SECONDS, time.monotonic()
        why, greeting = "never reached", self._settings.connect_seconds
        while True:
            try:
                await self._serve(await self._open(greeting))
            except (OSError, TimeoutError, WireError) as error:
                why = str(error) or type(error).__name__
            if self._refused:
                raise CoordinatorLost("this node is refused")
            if self._session is not None:
                # From here on the fence has a limit, and the next one may be elsewhere any moment.
                greeting = self._settings.fence_seconds / 3
                self.close()
                pause, lost_at = _FIRST_PAUSE_SECONDS, time.monotonic()
            if time.monotonic() - lost_at > patience_seconds:
                raise CoordinatorLost(f"no coordinator for {patience_seconds:g} s: {why}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    async def _open(self, greeting_seconds: float) -> _Session:
        """A connection up to its welcome. Once ``join`` is sent the welcome gets its whole time:
        to leave then would look like the death of this node.
        """
        address = self._address()
        if address is None:
            raise OSError("the coordinator has not said where it listens")
        limit = self._settings.connect_seconds
        tls = contexts(self._settings)
        reader, writer = await asyncio.wait_for(open_stream(address, tls), greeting_seconds)
        try:
            handshake = connect_stream(reader, writer, self._secret, self._run_id)
            await asyncio.wait_for(handshake, greeting_seconds)
            sent_at = time.monotonic()
            had = {"term": self._term, "of": self._boot, "o": self._ordered}
            writer.write(framing.encode({**self._join(), **had}))
            welcome = await asyncio.wait_for(self._welcome(reader, address), limit)
        except BaseException:
            writer.close()
            raise
        if welcome.get("t") == "welcome":
            self._heard(sent_at, int(welcome["term"]))
        return _Session(reader, writer, address, welcome)

    async def _welcome(
        self, reader: asyncio.StreamReader, address: tuple[str, int]
    ) -> dict[str, Any]:
        """The answer to the join; raises ConnectionError when another coordinator takes over."""
        reading = asyncio.create_task(framing.read_frame(reader))
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=self._settings.fence_seconds / 12)
                if not reading.done() and self._address() not in (None, address):
                    raise ConnectionError("the coordinator was superseded while it greeted")
            return reading.result()
        finally:
            reading.cancel()

    async def _serve(self, session: _Session) -> None:
        """Until the connection ends. While it is silent, or another coordinator is the newest, a
        second one is tried beside it: a fresh greeting gets through a mended network at once, where
        an old connection waits for its next retransmission.
        """
        reading = self._begin(session)
        try:
            while True:
                retry = self.contact_seconds
                done, _ = await asyncio.wait({reading}, timeout=retry)
                if done:
                    reading.result()
                elif not self._refused and (self._is_silent(retry) or self._has_moved()):
                    try:
                        fresh = await self._open(retry)
                    except (OSError, TimeoutError, WireError):
                        continue  # the present one may still come back
                    reading.cancel()
                    self._leave(fresh)
                    reading = self._begin(fresh)
        finally:
            reading.cancel()

    def _leave(self, fresh: _Session) -> None:
        """Close the connection that a fresh one replaces. To a coordinator that does not know of
        its successor this would look like the death of this node, so it is told.
        """
        if self._session is None:
            return
        if fresh.term > self._session.term:
            self.supersede(f"went over to term {fresh.term}")
        self._session.writer.close()

    def _begin(self, session: _Session) -> asyncio.Task[None]:
        self._session = session
        self._refused = session.welcome.get("t") == "refused"
        self._unacknowledged.acknowledge(int(session.welcome.get("seen", 0)))
        self._term = max(self._term, session.term)
        asked = float(session.welcome.get("beat_seconds", 0.0))
        self._pace = Pace(max(asked, self._settings.beat_interval_seconds))
        boot, self._boot = self._boot, str(session.welcome.get("boot", ""))
        if boot != self._boot:
            self._ordered = 0
        if boot and boot != self._boot:
            waiting = {number for number, _ in self._unacknowledged}
            for _, number, data in self._retained:
                if number not in waiting:
                    session.writer.write(data)
        for _, data in self._unacknowledged:
            session.writer.write(data)
        self._on_message(session.welcome)
        reading = asyncio.create_task(self._read(session))
        # It may end while the one that replaces it is being opened; nobody asks it then.
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return reading

    async def _read(self, session: _Session) -> None:
        # A silent coordinator (its host cut off) shows by missing acknowledgements of beats.
        silence = max(4 * self._settings.node_silence_seconds, self._settings.connect_seconds)
        while True:
            message = await asyncio.wait_for(framing.read_frame(session.reader), silence)
            if message.get("t") == "ack":
                self._unacknowledged.acknowledge(int(message["n"]))
                self._heard(float(message["beat"]), session.term)
            elif int(message.get("o", self._ordered + 1)) > self._ordered:
                self._ordered = int(message.get("o", self._ordered))
                self._on_message(message)

    def _is_silent(self, limit_seconds: float) -> bool:
        return time.monotonic() - self._heard_at > limit_seconds

    def _has_moved(self) -> bool:
        address = self._address()
        return self._session is not None and address not in (None, self._session.address)

    def _heard(self, sent_at: float, term: int) -> None:
        self._heard_at = max(self._heard_at, sent_at)
        self._on_heard(sent_at, term)


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
